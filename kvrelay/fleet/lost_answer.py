"""An answer that lost its D, and waits for its turn to go on or for a worker that could write it. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.fleet.flight import Ask, Flight, Rest


@dataclass(frozen=True)
class LostAnswer:
    """One of them."""

    flight: Flight
    ask: Ask
    rest: Rest
    seconds: float
    """Predicted prefill."""
    since_s: float
    nobody_since_s: float | None = None
    """Since when nobody could write it who may soon be able to; None while somebody can."""

    @property
    def model(self) -> str:
        return self.ask.facts.model

    def found(self, *, nobody: bool, now: float) -> LostAnswer:
        """Somebody looked for a worker."""
        return replace(self, nobody_since_s=now if nobody else None)

    @property
    def urgency(self) -> tuple[int, float, float]:
        """The least goes first: priority, then whoever would be back soonest if all had begun at once. So long prompts
        let shorter ones pass, and not for ever."""
        return -self.ask.slo.priority, self.since_s + self.seconds, self.since_s
