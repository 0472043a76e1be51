"""How long decode workers take for a step now, as the streams tell that they write. What answers teach that are over
comes too late for an engine that has just become slow. It must never be taken for a law of the engine."""

from __future__ import annotations

MAX_WORKERS = 2048
WEIGHT = 0.1
"""Of the newest gap: a look at each stream every 0.2 s makes up one's mind within a second."""


class Steps:
    """By worker."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Steps of {len(self._seconds)} workers>"

    def saw(self, worker: str, gap_s: float) -> None:
        """A stream has had so long a time between two words; 0: it had no two yet."""
        if not gap_s:
            return
        if len(self._seconds) >= MAX_WORKERS:
            self._seconds.clear()
        before_s = self._seconds.get(worker, gap_s)
        self._seconds[worker] = before_s + WEIGHT * (gap_s - before_s)

    def seconds(self, worker: str) -> float:
        """0 when nothing was seen."""
        return self._seconds.get(worker, 0.0)
