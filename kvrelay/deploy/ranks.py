"""Whether a model can be split among so many ranks."""

from __future__ import annotations

from kvrelay.deploy.architecture import Architecture
from kvrelay.errors import Misconfigured


def require_ranks(model: Architecture, ranks: int) -> None:
    """Raise ``Misconfigured`` when ``model`` cannot be split among so many ``ranks``."""
    if not model.num_attention_heads or _allows(model, ranks):
        return
    possible = [str(count) for count in range(1, model.num_attention_heads + 1) if _allows(model, count)]
    raise Misconfigured(
        f"worker.tensor_parallel: {ranks} ranks cannot share the {model.num_attention_heads} attention heads and "
        f"{model.kv_heads} KV heads of {model.name} evenly; possible: {', '.join(possible)}"
    )


def _allows(model: Architecture, ranks: int) -> bool:
    """Whether each rank gets equally many heads, and whole KV heads or copies of equally many."""
    is_whole = model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0
    return model.num_attention_heads % ranks == 0 and is_whole
