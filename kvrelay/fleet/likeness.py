"""How much slower or faster than its kind a worker is. What its own law says of work that it seldom did must never tell
it from others: each sees other work, and where they saw little, the laws of like workers differ by a tenth and more."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvrelay.fleet.rates import Law
from kvrelay.policy.fit import Fit
from kvrelay.policy.perf import Rates

SURE_TIMES = 3.0
"""Twice the standard error of a mean, by the median of what it is the mean of."""
SOON = 3
"""Errors in a row that are news (``Fit.news``) before the law has followed."""
LEAST_CHANCE = 0.001
"""No choice depends on less, and as long as a worker is like its kind, nothing is to be done when that learns."""


class Shown(NamedTuple):
    """What a worker showed by one law."""

    work: Rates
    """Decayed sums of the amounts of its work, each divided by the seconds that the work took (``Fit.pull``)."""
    own: float
    """Seconds that its own law says for ``work``, corrected by its last observation where that is news."""
    chance: float
    """How far ``own`` may be off by chance, as a logarithm."""


class Likeness:
    """What each worker showed, ready to be compared: a kind learns more often than each of its workers."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, Law], Shown] = {}

    def __repr__(self) -> str:
        return f"<Likeness of {len(self._shown)} laws>"

    def learned(self, worker: str, law: Law, own: Fit) -> None:
        """``own`` is what was learned of ``worker`` so far. One that begins anew speaks of the same work."""
        before = self._shown.get((worker, law))
        work = own.pull if any(own.pull) or before is None else before.work
        seconds = own.seconds(*work) * math.exp(own.news(SOON))
        self._shown[worker, law] = Shown(work, seconds, _chance(own))

    def factor(self, worker: str, law: Law, kind: Fit) -> float:
        """How many times as long as its ``kind`` ``worker`` takes for what it did; 1 while that may be chance.

        Chance is taken off the difference, so that one that is hardly more than chance counts for hardly anything.
        """
        shown = self._shown.get((worker, law))
        like = kind.seconds(*shown.work) if shown is not None else 0.0
        if shown is None or like <= 0.0:
            return 1.0
        off = math.log(shown.own / like)
        sure = abs(off) - shown.chance
        return math.exp(math.copysign(sure, off)) if sure > 0.0 else 1.0

    def forget(self, worker: str) -> None:
        """Nothing was learned of it."""
        for law in Law:
            self._shown.pop((worker, law), None)


def _chance(own: Fit) -> float:
    """How far the mean of what was seen may be off."""
    return max(LEAST_CHANCE, SURE_TIMES * own.chance() / math.sqrt(max(1, len(own.errors))))
