"""When routers that died are started again: soon, but later and later where they do not even come to serve. It must
never give up on one while another serves."""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
"""A death counts for so long."""
MOST_DEATHS = 8
"""When none serves any more after so many, there is a fault that a new start does not mend."""
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 60.0
SERVED_PAUSE_S = 1.0
"""Longest pause of one that did serve: the other one may be next."""


class Revivals:
    """The deaths of all routers of a cluster."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._vain: dict[str, float] = {}
        """The last pause of each that did not come to serve."""

    def __repr__(self) -> str:
        return f"<Revivals after {len(self._deaths)} deaths>"

    def may_begin_anew(self, now: float) -> bool:
        """Whether to start again although none serves: they did not die too often."""
        return self._recent(now) < MOST_DEATHS

    def died(self, name: str, now: float, *, served: bool) -> float:
        """``name`` is found dead, and did or did not come to serve; how long it has to wait, in seconds."""
        pause_s = SERVED_PAUSE_S if self._recent(now) else 0.0
        if served:
            self._vain.pop(name, None)
        else:
            pause_s = self._vain[name] = min(LAST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._vain.get(name, 0.0)))
        self._deaths.append(now)
        return pause_s

    def _recent(self, now: float) -> int:
        return sum(now - death_s < WINDOW_S for death_s in self._deaths)
