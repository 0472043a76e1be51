"""What became of an answer that lost its decode worker, for its timeline. A frozen value."""

from __future__ import annotations

from kvrelay.policy.loss import LossReason
from kvrelay.types import Value


class Resumption(Value, frozen=True, kw_only=True):
    """One loss. Moments are seconds since the request was received, on the router's clock."""

    reason: LossReason
    lost_worker: str
    lost_at: float
    tokens: int
    """Tokens of all choices that were written before the loss."""
    manner: str
    """``policy.recover.Manner``."""
    outcome: str = "open"
    """``resumed``, ``failed`` or, as long as neither is known, ``open``."""
    worker: str = ""
    """The worker that writes the rest."""
    strategy: str = ""
    """``policy.recover.Strategy``: the one that was predicted to be the cheapest."""
    cached_tokens: int = 0
    """Tokens of prompt and journal that are predicted to be loaded instead of computed."""
    prefill_s: float = 0.0
    """Predicted time to compute the other tokens."""
    pause_s: float | None = None
    """Time between the last piece from the lost worker and the first one from the next, at the client."""

    def report(self) -> dict[str, object]:
        """JSON-ready; what is not known is left out."""
        known = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in known.items() if value not in ("", None)}
