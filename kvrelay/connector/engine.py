"""What of vLLM's request objects and configuration the connector relies on, and which set-ups it refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvrelay.errors import Misconfigured
from kvrelay.identity import NAMING_VERSION
from kvrelay.types import DTYPE_BYTES, Codec, Engine, Fingerprint, PageFormat

REPLAY = "kvrelay.connector.replay:Replay"
"""The logits processor of our engines, as vLLM wants it named."""


class EngineRequest(Protocol):
    """The attributes of ``vllm.v1.request.Request`` that are read here."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    cache_salt: str | None
    num_prompt_tokens: int
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


def has_plain_identity(request: Any) -> bool:
    """Whether tokens and salt alone decide the request's KV.

    Adapters, images and embeddings do not enter page names yet, so such requests pass through: nothing is
    loaded for them and nothing of them is saved.
    """
    return (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and request.pooling_params is None
    )


def layer_names(kv_cache_config: Any) -> list[str]:
    """The layers whose KV makes a page, in the order of the model."""
    return list(kv_cache_config.kv_cache_groups[0].layer_names)


def describe_engine(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    weights: str,
    page_tokens: int,
    version: str,
    device: str,
    lossy: Codec | None,
) -> Engine:
    """What this engine is, for pairing. Raises ``Misconfigured`` for set-ups that pages cannot express."""
    refuse_unsupported(vllm_config, kv_cache_config, page_tokens)
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    page_format = PageFormat(
        layers=len(layer_names(kv_cache_config)),
        kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        lossy=lossy,
    )
    fingerprint = Fingerprint(
        weights=weights, weights_epoch=0, format=page_format, naming=NAMING_VERSION, engine=f"vllm {version}"
    )
    return Engine(
        fingerprint=fingerprint,
        kv_tokens=kv_cache_config.num_blocks * spec.block_size,
        block_tokens=spec.block_size,
        max_model_len=vllm_config.model_config.max_model_len,
        max_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        shared_chunk_tokens=vllm_config.scheduler_config.long_prefill_token_threshold,
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        device=device,
        replays=REPLAY in (getattr(vllm_config.model_config, "logits_processors", None) or ()),
    )


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any, page_tokens: int) -> None:
    """Raise ``Misconfigured`` with one sentence that says what to change."""
    refusals = (
        *_refused_models(vllm_config, kv_cache_config),
        *_refused_parallelism(vllm_config),
        *_refused_settings(vllm_config, kv_cache_config, page_tokens),
    )
    for refused, sentence in refusals:
        if refused:
            raise Misconfigured(f"kvrelay: {sentence}")


def _refused_models(vllm_config: Any, kv_cache_config: Any) -> list[tuple[bool, str]]:
    groups = kv_cache_config.kv_cache_groups
    kind = type(groups[0].kv_cache_spec).__name__ if groups else "none"
    unequal = kind == "FullAttentionSpec" and groups[0].kv_cache_spec.head_size_v != groups[0].kv_cache_spec.head_size
    return [
        (
            len(groups) != 1 or kind != "FullAttentionSpec",
            f"only models with one full-attention KV cache group are supported, this one has {len(groups)} "
            f"({kind}); serve it without kvrelay, or for sliding windows add --disable-hybrid-kv-cache-manager",
        ),
        (unequal, "models whose head_size_v is not their head_size are not supported; serve this one without kvrelay"),
        (vllm_config.model_config.is_encoder_decoder, "encoder-decoder models are not supported; serve them unsplit"),
    ]


def _refused_parallelism(vllm_config: Any) -> list[tuple[bool, str]]:
    parallel = vllm_config.parallel_config
    ranks, kv_heads = parallel.tensor_parallel_size, vllm_config.model_config.get_total_num_kv_heads()
    return [
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism is not supported; use --pipeline-parallel-size 1"),
        (parallel.data_parallel_size > 1, "run one engine per worker (--data-parallel-size 1) and add workers"),
        (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
            "context parallelism is not supported; leave the context-parallel sizes at 1",
        ),
        (
            ranks > 1 and kv_heads % ranks != 0 and ranks % kv_heads != 0,
            f"{ranks} ranks cannot share {kv_heads} KV heads evenly; choose another --tensor-parallel-size",
        ),
    ]


def _refused_settings(vllm_config: Any, kv_cache_config: Any, page_tokens: int) -> list[tuple[bool, str]]:
    groups = kv_cache_config.kv_cache_groups
    dtype = str(getattr(groups[0].kv_cache_spec, "dtype", "?")).removeprefix("torch.") if groups else "?"
    block_tokens = groups[0].kv_cache_spec.block_size if groups else page_tokens
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    return [
        (
            dtype not in DTYPE_BYTES,
            f"KV cache dtype {vllm_config.cache_config.cache_dtype} ({dtype}) is not supported: a page has no place "
            f"for scales; use --kv-cache-dtype auto with --dtype {', '.join(DTYPE_BYTES)}",
        ),
        (
            block_tokens % page_tokens != 0 and page_tokens % block_tokens != 0,
            f"page_tokens {page_tokens} and block size {block_tokens} must divide one another",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding is not supported in this version; remove --speculative-config",
        ),
        (policy not in ("recompute", "fail"), f"kv_load_failure_policy {policy!r} is unknown; use 'recompute'"),
    ]


def write_engine_file(path: Path, engine: Engine) -> None:
    """Publish ``engine`` as JSON, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_bytes(msgspec.json.encode(engine))
    partial.replace(path)
