"""Lost answers that wait, and how fast their prompts may be computed again. Each model for itself: workers of one have
nothing to do with the deaths of another one's. It must never keep one waiting that costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.fleet.lost_answer import LostAnswer
from kvrelay.policy.recover import Pace

CHEAP_S = 0.05
"""What is loaded rather than computed need not wait for its turn: it is no more than a step or two of its worker."""
FORGET_S = 600.0
"""Time without a loss after which the line of a model is dropped: the model may have left."""


@dataclass
class Line:
    """Lost answers of one model, and the token bucket of their prefills."""

    pace: Pace = field(default_factory=Pace)
    waiting: dict[str, LostAnswer] = field(default_factory=dict)
    """Answers that wait, by request."""


class Turns:
    """Lines of lost answers, one for each model that a router serves."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def __repr__(self) -> str:
        return f"<Turns {len(self)} waiting, {len(self._lines)} models>"

    def __len__(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    def __iter__(self) -> Iterator[LostAnswer]:
        """All answers that wait, of all models."""
        return iter([lost for line in self._lines.values() for lost in line.waiting.values()])

    def get(self, request_id: str) -> LostAnswer | None:
        return next((lost for line in self._lines.values() if (lost := line.waiting.get(request_id))), None)

    def wait(self, lost: LostAnswer) -> None:
        """The answer waits from now on, or what is known of it has changed."""
        self._line(lost.model).waiting[lost.flight.request_id] = lost

    def leave(self, request_id: str) -> None:
        """The answer waits no more, if it did."""
        for line in self._lines.values():
            line.waiting.pop(request_id, None)

    def models(self) -> list[str]:
        """Models with answers that wait."""
        return [model for model, line in self._lines.items() if line.waiting]

    def ordered(self, model: str) -> list[LostAnswer]:
        """Waiting answers of ``model``, the one whose turn it is first."""
        return sorted(self._line(model).waiting.values(), key=lambda lost: lost.urgency)

    def may_pass(self, model: str, seconds: float, now: float, workers: int) -> bool:
        """Whether a prompt of so many ``seconds`` may be computed now, of one that does not wait yet."""
        return seconds <= CHEAP_S or (not self._line(model).waiting and self.allows(model, now, workers))

    def allows(self, model: str, now: float, workers: int) -> bool:
        """Whether the next waiting answer may go on. ``workers``: workers of the model that share the prefills."""
        return self._line(model).pace.allows(now, workers)

    def spend(self, model: str, seconds: float, now: float, workers: int) -> None:
        """A prefill of so many ``seconds`` begins."""
        line = self._line(model)
        line.pace = line.pace.spend(seconds, now, workers)

    def expire(self, now: float) -> None:
        """Forget models that may have left."""
        idle = [model for model, line in self._lines.items() if not line.waiting and now - line.pace.at_s > FORGET_S]
        for model in idle:
            del self._lines[model]

    def _line(self, model: str) -> Line:
        return self._lines.setdefault(model, Line())
