"""When members that died are started again: at once, later where one dies again soon, and no more after some
such deaths. It must never keep one down that was well in between."""

from __future__ import annotations

MOST_DEATHS = 5
"""So many in a row, each soon after its start, have a reason that a new start does not mend."""
WELL_S = 30.0
"""Who serves for so long is well: what kills it then is something new."""
FIRST_PAUSE_S = 0.5


class Comebacks:
    """The deaths of all members of a cluster but replicas, and which of them stay dead."""

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}
        """In a row, of each that was not well since."""
        self._down: set[str] = set()

    def __repr__(self) -> str:
        return f"<Comebacks, {len(self._down)} down>"

    def is_down(self, name: str) -> bool:
        """Whether ``name`` died too often, and stays dead."""
        return name in self._down

    def died(self, name: str, served_s: float) -> float | None:
        """``name`` is found dead after so long a time in which it served; how long it has to wait, in seconds, or None:
        it stays down."""
        deaths = self._deaths[name] = 1 if served_s >= WELL_S else self._deaths.get(name, 0) + 1
        if deaths >= MOST_DEATHS:
            self._down.add(name)
            return None
        return 0.0 if deaths == 1 else FIRST_PAUSE_S * float(1 << (deaths - 2))

    def wanted(self, name: str) -> None:
        """Somebody started it, or killed it on purpose: what was before says nothing any more."""
        self._down.discard(name)
        self._deaths.pop(name, None)
