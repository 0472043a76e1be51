"""What this router itself has run short of: descriptors, memory, connections for clients. It must never be taken for a
fault of a worker, nor fill the log."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

log = logging.getLogger("kvrelay.router")

SAY_EVERY_S = 10.0
"""Time between two lines of one kind in the log, and for which a shortage shows in ``/health``."""


class Seldom:
    """Lines of one kind in the log, one in ``SAY_EVERY_S``: whoever causes them must not fill it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_until_s = -math.inf
        self._unsaid = 0

    def __repr__(self) -> str:
        return f"<Seldom, {self._unsaid} unsaid>"

    def warn(self, what: str) -> None:
        if self._clock() < self._silent_until_s:
            self._unsaid += 1
            return
        log.warning("%s (%d more since the last such line)", what, self._unsaid)
        self._silent_until_s, self._unsaid = self._clock() + SAY_EVERY_S, 0


class Lack(StrEnum):
    """What there was too little of. The words are labels of a metric."""

    DESCRIPTORS = "descriptors"
    """File descriptors or memory, as the system says when a connection to a worker is made."""
    CONNECTIONS = "connections"
    """Connections of clients: one was closed to make room for another, or refused."""


class Shortage:
    """What was short, how often, and whether it still is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines = {lack: Seldom(clock) for lack in Lack}
        self._last = ("", -math.inf)
        self.counts: Counter[Lack] = Counter()

    def __repr__(self) -> str:
        told = ", ".join(f"{count} times {lack}" for lack, count in self.counts.items())
        return f"<Shortage {told or 'of nothing'}>"

    def add(self, lack: Lack, why: str) -> None:
        """``why``: a sentence for an operator, with what to do."""
        self.counts[lack] += 1
        self._last = (why, self._clock())
        self._lines[lack].warn(why)

    @property
    def why(self) -> str:
        """What was short just now; empty when nothing was."""
        why, at_s = self._last
        return why if self._clock() - at_s < SAY_EVERY_S else ""
