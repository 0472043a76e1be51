"""Lets a learned slowness fade that no request tests any more. A worker that is predicted to be slow is not chosen
while others are idle, so the prediction would stay for ever, though the worker was only held up once. It must never
send a slow worker more than a request now and then."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvrelay.fleet.rates import Law
from kvrelay.policy.fit import Fit
from kvrelay.policy.perf import prefill_amounts
from kvrelay.policy.prices import EQUAL_SHARE
from kvrelay.types import Value

FADE_AFTER_S = 30.0
"""A law that no request has tested for this time is replaced by that of the best worker of the kind until one does.
Equal workers take turns, so the next request or the one after it is the test."""
LONGEST_FADE_S = 960.0
"""Longest such time: it doubles with each test that shows the worker as slow as predicted, so that few clients meet a
slow worker."""
LOOK_EVERY_S = 5.0
ROUNDING = 1e-9
_USUAL: dict[Law, tuple[float, ...]] = {
    Law.PREFILL: prefill_amounts(1000.0, 0.0),
    Law.STEP: (1.0, 8.0, 8000.0),
    Law.ANSWER: (1.0,),
}
"""Amounts for which workers are compared."""


class Belief(Value, frozen=True, kw_only=True):
    """How old one law of one worker is, and what replaces it once it has faded."""

    seen: int
    """Observations that the law had learned when it was last looked at."""
    since_s: float
    """When the last of them was noticed, on the clock of ``now``."""
    after_s: float = FADE_AFTER_S
    like: Fit | None = None
    """The law that is used instead of the learned one, once that has faded; None before."""
    is_on_trial: bool = False
    """A request is on its way that will show whether the worker is still slow: ``like`` is out of use until it has."""


def usual_s(fit: Fit, law: Law) -> float:
    """Seconds that ``fit`` predicts for a usual amount of work."""
    return fit.seconds(*_USUAL[law])


class Fading:
    """How long ago each law of each worker was last tested by a request."""

    def __init__(self) -> None:
        self._beliefs: dict[tuple[str, Law], Belief] = {}
        self._looked_s = float("-inf")

    def __repr__(self) -> str:
        faded = sum(belief.like is not None for belief in self._beliefs.values())
        return f"<Fading of {len(self._beliefs)} beliefs, {faded} faded>"

    def is_time(self, now: float) -> bool:
        """Whether to look again; asked at every tick."""
        if now - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s = now
        return True

    def look(self, worker: str, law: Law, own: Fit, best: Fit, now: float) -> bool:
        """Compare the age and speed of ``own`` with the ``best`` of its kind. True when the law in use changes."""
        belief = self._beliefs.get((worker, law))
        if belief is None or belief.seen != own.seen:
            after_s = FADE_AFTER_S if belief is None else belief.after_s
            self._beliefs[worker, law] = Belief(seen=own.seen, since_s=now, after_s=after_s)
            return False
        faded = now - belief.since_s >= belief.after_s and _is_slower(own, best, law)
        if belief.is_on_trial and not faded:
            return False
        like = best if faded else None
        if like is not belief.like or belief.is_on_trial:
            self._beliefs[worker, law] = msgspec.structs.replace(belief, like=like, is_on_trial=False)
        return like is not belief.like or belief.is_on_trial

    def like(self, worker: str, law: Law) -> Fit | None:
        """The law that replaces the learned one of ``worker`` until a request tests it; None when the learned one
        counts."""
        belief = self._beliefs.get((worker, law))
        return belief.like if belief is not None and not belief.is_on_trial else None

    def try_out(self, worker: str, law: Law) -> bool:
        """A request goes to ``worker`` and tests the law. True when the learned law counts again from now on.

        A test without a result is repeated after the same time.
        """
        belief = self._beliefs.get((worker, law))
        if belief is None or belief.like is None or belief.is_on_trial:
            return False
        self._beliefs[worker, law] = msgspec.structs.replace(belief, is_on_trial=True, since_s=self._looked_s)
        return True

    def tested(self, worker: str, law: Law) -> Fit | None:
        """The law to compare with what ``worker`` does next; None when its own has not faded."""
        belief = self._beliefs.get((worker, law))
        return belief.like if belief is not None else None

    def tried(self, worker: str, law: Law, *, slow: bool) -> None:
        """A worker whose slowness had faded was tested; ``slow``: it was as slow as learned."""
        belief = self._beliefs.pop((worker, law))
        if slow:
            after_s = min(LONGEST_FADE_S, 2 * belief.after_s)
            self._beliefs[worker, law] = msgspec.structs.replace(belief, after_s=after_s, like=None, is_on_trial=False)

    def forget(self, worker: str) -> None:
        """Another worker has the name now: nothing was learned of it."""
        for law in Law:
            self._beliefs.pop((worker, law), None)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Forget all other workers."""
        known = set(workers)
        for key in [key for key in self._beliefs if key[0] not in known]:
            del self._beliefs[key]


def _is_slower(own: Fit, best: Fit, law: Law) -> bool:
    """Whether ``own`` is so much slower than ``best`` that a choice between the two falls on the best."""
    return usual_s(own, law) > (1.0 + EQUAL_SHARE + ROUNDING) * usual_s(best, law)
