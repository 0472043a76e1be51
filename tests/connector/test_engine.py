"""What an engine says of itself for pairing, and the set-ups that it refuses before it serves anybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.connector.engine import describe_engine
from kvrelay.errors import Misconfigured
from kvrelay.identity import Exact, Unlike, can_exchange
from kvrelay.types import Engine


class FullAttentionSpec(SimpleNamespace):
    """Stands for vLLM's spec of the same name, which is known by it."""


class MLAAttentionSpec(SimpleNamespace):
    """A cache of another kind."""


def vllm_config(**changed: Any) -> Any:
    """vLLM's configuration as far as it is read; ``changed``: by its path, dots written as ``__``."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, max_model_len=1024, total=4, get_total_num_kv_heads=lambda: 4
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128, long_prefill_token_threshold=64),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )
    for path, value in changed.items():
        *owners, name = path.split("__")
        target = config
        for owner in owners:
            target = getattr(target, owner)
        setattr(target, name, value)
    return config


def caches(kind: type[SimpleNamespace] = FullAttentionSpec, groups: int = 1, **changed: Any) -> Any:
    fields = {
        "num_kv_heads": 4,
        "head_size": 32,
        "head_size_v": 32,
        "dtype": "torch.bfloat16",
        "block_size": 128,
    } | changed
    group = SimpleNamespace(layer_names=["layer.0", "layer.1"], kv_cache_spec=kind(**fields))
    return SimpleNamespace(num_blocks=10, kv_cache_groups=[group] * groups)


def describe(config: Any | None = None, cache: Any | None = None, page_tokens: int = 32, weights: str = "w") -> Engine:
    return describe_engine(
        config or vllm_config(),
        cache or caches(),
        weights=weights,
        page_tokens=page_tokens,
        version="0.32.0",
        device="cpu",
        lossy=None,
    )


@pytest.mark.parametrize(("ranks", "held", "writers"), [(1, 4, 1), (2, 2, 2), (4, 1, 4), (8, 1, 4)])
def test_ranks_and_block_size_make_no_other_pages(ranks: int, held: int, writers: int) -> None:
    config = vllm_config(parallel_config__tensor_parallel_size=ranks)
    engine = describe(config, caches(num_kv_heads=held, block_size=64))
    assert engine.fingerprint.format.kv_heads == 4
    assert (engine.tensor_parallel, engine.page_writers) == (ranks, writers)
    assert can_exchange(engine.fingerprint, describe().fingerprint) == Exact()


def test_another_revision_of_the_model_is_another_engine() -> None:
    assert can_exchange(describe().fingerprint, describe(weights="v").fingerprint) == Unlike(field="weights")


REFUSED: list[tuple[Any, Any, str]] = [
    (vllm_config(speculative_config=SimpleNamespace()), None, "speculative decoding"),
    (None, caches(MLAAttentionSpec), "MLAAttentionSpec"),
    (None, caches(head_size_v=16), "head_size_v"),
    (None, caches(groups=2), "one full-attention KV cache group"),
    (vllm_config(cache_config__cache_dtype="fp8"), caches(dtype="torch.uint8"), "KV cache dtype fp8"),
    (vllm_config(parallel_config__pipeline_parallel_size=2), None, "--pipeline-parallel-size"),
    (vllm_config(parallel_config__data_parallel_size=2), None, "--data-parallel-size"),
    (vllm_config(parallel_config__decode_context_parallel_size=2), None, "context-parallel"),
    (vllm_config(parallel_config__tensor_parallel_size=3), None, "3 ranks cannot share 4 KV heads"),
    (vllm_config(model_config__is_encoder_decoder=True), None, "encoder-decoder"),
    (vllm_config(kv_transfer_config__kv_load_failure_policy="retry"), None, "kv_load_failure_policy 'retry'"),
    (None, caches(block_size=48), "page_tokens 32 and block size 48"),
]


@pytest.mark.parametrize(("config", "cache", "said"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_pages_cannot_express_is_refused_with_what_to_change(config: Any, cache: Any, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        describe(config, cache)
