"""What stock vLLM does when a synchronous load fails, on its own scheduler. While this passes, kvrelay must not load
synchronously: unverified blocks would be found by other requests. See docs/decisions/0007-layerwise-load.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.deploy.tiny import TinyShape, make_tiny

pytestmark = pytest.mark.vllm

BLOCK = 32
CHUNK = 64
TOKENS = 10 * BLOCK + 1


class EngineCore:
    """vLLM's scheduler without workers; steps are told to have computed what they were asked."""

    def __init__(self, model: Path) -> None:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=1024),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=CHUNK,
                max_num_seqs=4,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="SyncConnector",
                kv_connector_module_path="tests.connector.sync_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
        )
        config.cache_config.num_gpu_blocks = 100
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        blocks = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            config, blocks, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK
        )

    def ask(self, request_id: str) -> None:
        """A request with the one prompt that there is."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        ids = list(range(100, 100 + TOKENS))
        self.scheduler.add_request(
            Request(request_id, ids, SamplingParams(max_tokens=5), None, block_hasher=self._hasher)
        )

    def step(self, failed: str | None = None) -> tuple[Any, list[int]]:
        """Run one step in which the load of ``failed`` fails from its first block on.

        What was scheduled, and the blocks that nothing was loaded into.
        """
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        bad: list[int] = self.scheduler.kv_cache_manager.get_block_ids(failed)[0] if failed else []
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[id] for id in ids]
        sampled = [[7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={id: index for index, id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=KVConnectorOutput(invalid_block_ids=set(bad)),
            ),
        )
        return output, bad


def test_after_a_failed_synchronous_load_another_request_takes_blocks_that_nobody_wrote(tmp_path: Path) -> None:
    from vllm.v1.request import RequestStatus

    from tests.connector.sync_connector import LOADED

    engine = EngineCore(make_tiny(tmp_path / "model", TinyShape()))
    engine.ask(LOADED)
    output, blocks = engine.step(failed=LOADED)
    assert output.has_sync_kv_loads
    assert engine.scheduler.requests[LOADED].num_computed_tokens == 0, "all is to be computed again"
    engine.step()
    computed = engine.scheduler.requests[LOADED].num_computed_tokens
    assert computed == CHUNK, "a part of it is computed when the client goes away"
    engine.scheduler.finish_requests(LOADED, RequestStatus.FINISHED_ABORTED)

    engine.ask("another")
    (another,) = engine.step()[0].scheduled_new_reqs
    never_written = blocks[computed // BLOCK : TOKENS // BLOCK]
    assert never_written
    assert set(never_written) <= set(another.block_ids[0])
    assert another.num_computed_tokens == TOKENS - 1, "it takes them for its own prompt"
