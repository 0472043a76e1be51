"""Decides when a request is let in although it is predicted to miss its promise: workers that were slow once would be
believed slow for ever, since refused requests teach nothing. It must never let in more of them than it takes to see."""

from __future__ import annotations

import math

from kvrelay.fleet.actual import actual
from kvrelay.fleet.flight import Flight
from kvrelay.policy.admit import Accepted, Despite, Held, Turned, is_kept

TRY_EVERY_S = 10.0
"""How long requests of one model are refused for their promises before one of them is let in. One that keeps its
promise is followed by the next at once."""
PROMISES = frozenset({"ttft", "tpot"})
"""Kinds of refusals that a trial may prove wrong."""
MAX_MODELS = 256


class Trials:
    """The trials of one router, by model."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        """When the first request of each model was refused for its promise, or the last one was let in on trial."""

    def __repr__(self) -> str:
        return f"<Trials of {', '.join(sorted(self._since_s)) or 'nothing'}>"

    def is_due(self, model: str, now: float) -> bool:
        """Whether the next request that is alone is let in, whatever is predicted of it."""
        return now - self._since_s.get(model, now) >= TRY_EVERY_S

    def judged(self, model: str, verdict: Accepted | Held | Turned, now: float) -> None:
        """What became of a request."""
        if isinstance(verdict, Turned) and verdict.kind in PROMISES:
            if model not in self._since_s and len(self._since_s) >= MAX_MODELS:
                self._since_s.clear()
            self._since_s.setdefault(model, now)
        elif isinstance(verdict, Accepted) and verdict.despite is Despite.TRIAL:
            self._since_s[model] = now

    def landed(self, flight: Flight) -> None:
        """A request is over: a trial that has kept its promise shows that the prediction does not hold."""
        timeline = flight.timeline
        if timeline.despite is Despite.TRIAL:
            tpot_s = actual(timeline, flight.ask.sequences).tpot_s
            if is_kept(flight.ask.slo, timeline.events.get("first_token"), tpot_s):
                self._since_s[flight.ask.facts.model] = -math.inf
