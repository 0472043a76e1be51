"""An answer that lost its decode worker and waits for its turn, or for a worker that can take it. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.fleet.flight import Ask, Flight, Rest


@dataclass(frozen=True)
class LostAnswer:
    """One answer without a decode worker, as it waits."""

    flight: Flight
    ask: Ask
    rest: Rest
    seconds: float
    """Predicted time to compute the prompt again."""
    since_s: float
    nobody_since_s: float | None = None
    """Since when no decode worker can take the answer, though one may be able to soon; None while one can."""

    @property
    def model(self) -> str:
        return self.ask.facts.model

    def found(self, *, nobody: bool, now: float) -> LostAnswer:
        """The same answer after a look for a decode worker; ``nobody``: none can take it now."""
        return replace(self, nobody_since_s=now if nobody else None)

    @property
    def urgency(self) -> tuple[int, float, float]:
        """Sort key; the least goes first. Higher priority first, then the answer whose prefill would end first if each
        had begun when it was lost: shorter prompts pass longer ones, but not for ever."""
        return -self.ask.slo.priority, self.since_s + self.seconds, self.since_s
