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
    """The deaths of all routers of a cluster, and which of them wait for their new start."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._due_s: dict[str, float] = {}
        self._vain: dict[str, float] = {}
        """The last pause of each that did not come to serve."""

    def __repr__(self) -> str:
        return f"<Revivals after {len(self._deaths)} deaths, {len(self._due_s)} due>"

    def waits(self, name: str) -> bool:
        """Whether ``name`` is dead and will be started again."""
        return name in self._due_s

    def give_up(self) -> None:
        """Nobody who is dead will be started again."""
        self._due_s.clear()

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
        self._due_s[name] = now + pause_s
        return pause_s

    def hurry(self, now: float) -> None:
        """None is left: the time of all that wait has come."""
        self._due_s = dict.fromkeys(self._due_s, now)

    def is_due(self, name: str, now: float) -> bool:
        """Whether the time of one that waits has come."""
        return now >= self._due_s[name]

    def settled(self, name: str) -> None:
        """It waits no longer: it was started, or is not wanted any more."""
        self._due_s.pop(name, None)

    def _recent(self, now: float) -> int:
        return sum(now - death_s < WINDOW_S for death_s in self._deaths)
