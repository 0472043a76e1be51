"""Whether an engine's KV cache has room for one request of the longest kind."""

from __future__ import annotations

from kvrelay.config import Config
from kvrelay.deploy.architecture import Architecture
from kvrelay.errors import Misconfigured

_FLOAT32 = "float32"


def require_room(model: Architecture, config: Config) -> None:
    """Raise ``Misconfigured`` when one request of the longest kind would not fit: engines refuse to start then."""
    worker = config.worker
    tokens = worker.max_model_len or model.max_position_embeddings
    want = tokens * _token_bytes(model, 4 if config.model.dtype == _FLOAT32 else 2, worker.tensor_parallel)
    if worker.kv_cache_bytes < want:
        raise Misconfigured(
            f"worker.kv_cache_bytes: {worker.kv_cache_bytes} holds no request of {tokens} tokens, the longest that "
            f"{model.name} would take; give at least {want}, or lower worker.max_model_len"
        )


def _token_bytes(model: Architecture, element_bytes: int, ranks: int) -> int:
    """KV of a token on each of ``ranks``; 0 when unknown, or when layers keep unlike parts."""
    is_unlike = len(set(model.layer_types or ())) > 1
    if not model.num_attention_heads or model.sliding_window or is_unlike or model.kv_lora_rank:
        return 0
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    return 2 * model.num_hidden_layers * max(1, model.kv_heads // ranks) * head_dim * element_bytes
