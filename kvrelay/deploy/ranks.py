"""Whether a model can be split among so many ranks, as far as its config.json says it; the engine has the last word."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.errors import Misconfigured
from kvrelay.types import Value


class Heads(Value, frozen=True):
    """The attention heads of a model, by the keys of its config.json; 0 where it has none such."""

    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    """None: one for each attention head."""

    def allow(self, ranks: int) -> bool:
        """Whether each rank gets equally many heads, and whole KV heads or copies of equally many."""
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        return self.num_attention_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def require_ranks(folder: Path, ranks: int) -> None:
    """Raise ``Misconfigured`` when the model in ``folder`` cannot be split among so many ``ranks``."""
    heads = _heads(folder)
    if not heads.num_attention_heads or heads.allow(ranks):
        return
    kv_heads = heads.num_key_value_heads or heads.num_attention_heads
    possible = [str(count) for count in range(1, heads.num_attention_heads + 1) if heads.allow(count)]
    raise Misconfigured(
        f"worker.tensor_parallel: {ranks} ranks cannot share the {heads.num_attention_heads} attention heads and "
        f"{kv_heads} KV heads of {folder.name} evenly; possible: {', '.join(possible)}"
    )


def _heads(folder: Path) -> Heads:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=Heads)
    except (OSError, msgspec.DecodeError):
        return Heads()
