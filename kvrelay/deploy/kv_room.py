"""Whether an engine's KV cache has room for one request of the longest kind, as far as the model's config.json says it;
the engine has the last word."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.config import Config
from kvrelay.errors import Misconfigured
from kvrelay.types import Value

_FLOAT32 = "float32"


class KvShape(Value, frozen=True, kw_only=True):
    """What of a config.json says how large a token's KV is; 0 and None where it has none such."""

    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    head_dim: int | None = None
    max_position_embeddings: int = 0
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    kv_lora_rank: int | None = None

    def token_bytes(self, element_bytes: int, ranks: int) -> int:
        """KV of a token on each of ``ranks``; 0 when unknown, or when layers keep unlike parts."""
        if not self.num_attention_heads or self.sliding_window or self.layer_types or self.kv_lora_rank:
            return 0
        heads = self.num_key_value_heads or self.num_attention_heads
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        return 2 * self.num_hidden_layers * max(1, heads // ranks) * head_dim * element_bytes


def require_room(folder: Path, config: Config) -> None:
    """Raise ``Misconfigured`` when one request of the longest kind would not fit: engines refuse to start then."""
    try:
        shape = msgspec.json.decode((folder / "config.json").read_bytes(), type=KvShape)
    except (OSError, msgspec.DecodeError):
        return
    worker = config.worker
    tokens = worker.max_model_len or shape.max_position_embeddings
    want = tokens * shape.token_bytes(4 if config.model.dtype == _FLOAT32 else 2, worker.tensor_parallel)
    if worker.kv_cache_bytes < want:
        raise Misconfigured(
            f"worker.kv_cache_bytes: {worker.kv_cache_bytes} holds no request of {tokens} tokens, the longest that "
            f"{folder.name} would take; give at least {want}, or lower worker.max_model_len"
        )
