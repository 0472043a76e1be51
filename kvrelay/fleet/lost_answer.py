"""An answer that waits for its turn to go on, or for a worker that could write it. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def urgency(self) -> tuple[int, float, float]:
        """The least goes first: priority, then whoever would be back soonest if all had begun at once. So long prompts
        let shorter ones pass, and not for ever."""
        return -self.ask.slo.priority, self.since_s + self.seconds, self.since_s
