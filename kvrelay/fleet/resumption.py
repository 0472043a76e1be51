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
    """Written before, of all choices."""
    manner: str
    """``policy.recover.Manner``."""
    outcome: str = "open"
    """``resumed``, ``failed`` or, as long as neither is known, ``open``."""
    worker: str = ""
    """Who writes the rest."""
    strategy: str = ""
    """``policy.recover.Strategy``: the one that was predicted to be the cheapest."""
    cached_tokens: int = 0
    """Of the prompt and what was written: predicted to be loaded instead of computed."""
    prefill_s: float = 0.0
    """Predicted time to compute the others."""
    pause_s: float | None = None
    """What the client waited between the last piece from one worker and the first one from the other."""

    def report(self) -> dict[str, object]:
        """JSON-ready; what is not known is left out."""
        known = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in known.items() if value not in ("", None)}
