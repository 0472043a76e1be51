"""The sizes of a model, as far as its config.json says them; the engine has the last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvrelay.types import Value


class Architecture(Value, frozen=True, kw_only=True):
    """The keys of a config.json that say how attention is laid out; 0 and None where it has none such."""

    name: str
    """Name of its folder."""
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    """None: one for each attention head."""
    hidden_size: int = 0
    head_dim: int | None = None
    max_position_embeddings: int = 0
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    kv_lora_rank: int | None = None

    @staticmethod
    def read(folder: Path) -> Architecture:
        """The architecture of the model in ``folder``; an empty one when its config.json cannot be read."""
        try:
            settings = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
            return msgspec.convert({**settings, "name": folder.name}, Architecture)
        except (OSError, msgspec.DecodeError):
            return Architecture(name=folder.name)

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads
