"""The class that vLLM loads. It translates vLLM's hooks to the two halves and decides nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform

from kvrelay.config import ConnectorConfig
from kvrelay.connector.device import choose_mover, fill_wait_s
from kvrelay.connector.engine import EngineRequest, describe_engine, layer_names, write_engine_file
from kvrelay.connector.heads import RankHeads
from kvrelay.connector.plan import StepPlan
from kvrelay.connector.scheduler import SchedulerHalf
from kvrelay.connector.ticks import SCHEDULER, Ticks, ticks_path
from kvrelay.connector.worker import WorkerHalf
from kvrelay.errors import Misconfigured
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

EXTRA_KEY = "kvrelay"
"""Our section in ``kv_connector_extra_config``."""
_STEPS_AHEAD = 3
"""Granted slots cover so many full steps, so that a step finds them without asking."""


class StepMetadata(StepPlan, KVConnectorMetadata):
    """A plan as vLLM carries it from its engine process to its worker process."""


class KvrelayConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV over through the node's store. Stock vLLM 0.32, one full-attention KV cache group."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = _settings(vllm_config)
        self._engine = describe_engine(
            vllm_config,
            kv_cache_config,
            weights=self._settings.weights,
            page_tokens=self._settings.page_tokens,
            version=vllm_version,
            device=str(current_platform.get_device_name()),
            lossy=self._settings.lossy,
        )
        self._names = layer_names(kv_cache_config)
        self._key = Path(self._settings.key_file).read_bytes()  # links made later must not depend on the file
        self._requests: dict[str, EngineRequest] = {}
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        pages_a_step = self._engine.max_batched_tokens // self._settings.page_tokens + 1
        ahead = _STEPS_AHEAD * pages_a_step if role is KVConnectorRole.SCHEDULER else 0
        self._client = self._connect(self._engine.fingerprint.format, ahead)
        writer = SCHEDULER if role is KVConnectorRole.SCHEDULER else 1 + vllm_config.parallel_config.rank
        self._ticks = Ticks(ticks_path(Path(self._settings.engine_file)), writer)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._client,
                self._engine,
                owner=self._owner,
                load_wait_s=self._settings.load_wait_s,
                fill_wait_s=fill_wait_s(vllm_config),
            )
            write_engine_file(Path(self._settings.engine_file), self._engine)

    @property
    def _owner(self) -> str:
        return f"{self._settings.worker}/{self._settings.incarnation}"

    def _connect(self, format: PageFormat, grant_slots: int = 0) -> StoreClient:
        client = StoreClient(
            Path(self._settings.store_socket),
            self._key,
            owner=self._owner,
            format=format,
            grant_slots=grant_slots,
        )
        client.start()
        return client

    # ------------------------------------------------------------ what vLLM asks of any connector

    @property
    def requires_kv_delivery(self) -> bool:
        """A save is a cache write: a request that loses it loses nothing."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks are skipped inside full CUDA graphs."""
        return True

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._client.close()

    # ------------------------------------------------------------ scheduler half

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._half.free_blocks = gpu_block_pool.get_num_free_blocks

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._half.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._half.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._ticks.tick()
        is_idle = not scheduler_output.total_num_scheduled_tokens
        plan = self._half.build_plan(self._steps(scheduler_output), is_idle=is_idle)
        return StepMetadata(**vars(plan))

    def _steps(self, output: SchedulerOutput) -> Iterator[tuple[EngineRequest, list[int], int, int]]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            if request is not None and tables is not None:
                yield request, tables[0], computed[request_id], scheduled

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        finished = connector_output.finished_recving or ()
        self._half.loads_finished(finished, connector_output.invalid_block_ids or set())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._half.finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool:
        write_engine_file(Path(self._settings.engine_file), self._half.reset())
        return True

    # ------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        missing = [name for name in self._names if name not in kv_caches]
        if missing:
            raise Misconfigured(
                f"kvrelay: layers {missing[:3]} have no KV cache of their own; serve this model unsplit"
            )
        ordered = {name: kv_caches[name] for name in self._names}
        first = self._names[0]
        mover = choose_mover(self._vllm_config, first, kv_caches[first], self._engine.block_tokens, self._client)
        heads = RankHeads.of(
            get_tensor_model_parallel_rank(),
            self._engine.tensor_parallel,
            self._engine.fingerprint.format.kv_heads,
        )
        self._worker = WorkerHalf(
            self._client, ordered, mover, heads, load_wait_s=self._settings.load_wait_s, connect=self._connect
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            self._worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started before the step: they have a thread of their own."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All loads are asynchronous: no layer waits. Why: docs/decisions/0007-layerwise-load.md."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._ticks.tick()
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.after_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.collect() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()


def _settings(vllm_config: VllmConfig) -> ConnectorConfig:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    try:
        return msgspec.convert(extra.get(EXTRA_KEY, {}), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise Misconfigured(
            f"kv_connector_extra_config.{EXTRA_KEY}: {error}; start engines with `kvrelay worker`"
        ) from error
