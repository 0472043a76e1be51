"""How long decode workers take for a step now, as the streams tell that they write. What answers teach that are over
comes too late for an engine that has just become slow. It must never be taken for a law of the engine."""

from __future__ import annotations

from typing import NamedTuple

MAX_WORKERS = 2048
WEIGHT = 0.1
"""Weight of the newest gap: with a look at each stream every 0.2 s, the mean follows within a second."""
FORGET_S = 10.0
"""A step time older than this is not used: no stream was written since."""


class Step(NamedTuple):
    """Step time of one incarnation of a decode worker, in seconds, and when it was seen."""

    seconds: float
    seen_s: float
    incarnation: str


class Steps:
    """Present step times by decode worker."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}

    def __repr__(self) -> str:
        return f"<Steps of {len(self._steps)} workers>"

    def saw(self, worker: str, incarnation: str, gap_s: float, now: float) -> None:
        """A stream had so long a time between two words, the last of them ``now``; 0: it had no two yet."""
        if not gap_s:
            return
        known = self._steps.get(worker)
        seen_s = now if known is None or known.incarnation != incarnation else max(now, known.seen_s)
        before_s = self.seconds(worker, incarnation, seen_s) or gap_s
        if known is None and len(self._steps) >= MAX_WORKERS:
            self._steps.clear()
        self._steps[worker] = Step(before_s + WEIGHT * (gap_s - before_s), seen_s, incarnation)

    def seconds(self, worker: str, incarnation: str, now: float) -> float:
        """0 when nothing was seen of this incarnation as of late."""
        step = self._steps.get(worker)
        is_known = step is not None and step.incarnation == incarnation and now - step.seen_s <= FORGET_S
        return step.seconds if step is not None and is_known else 0.0
