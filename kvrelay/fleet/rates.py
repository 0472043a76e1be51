"""What is believed of each worker as plain numbers, always at hand. It must never show what was before."""

from __future__ import annotations

from enum import StrEnum

from kvrelay.policy.fit import Fit
from kvrelay.policy.laws import Laws
from kvrelay.policy.perf import Perf, Rates

MAX_KEPT = 64


class Law(StrEnum):
    """One law of ``Perf``."""

    PREFILL = "prefill"
    STEP = "step"
    ANSWER = "answer"

    def of(self, perf: Perf) -> Fit:
        """This law of ``perf``."""
        return perf.prefill if self is Law.PREFILL else perf.step if self is Law.STEP else perf.answer


class RateBook:
    """Rates of one law by worker: its own, or those of its kind, which all that believe them share."""

    def __init__(self) -> None:
        self._of_kind: dict[str, Rates] = {}
        self._own: dict[str, Rates] = {}
        self._kinds: dict[str, str] = {}

        self._kept: dict[tuple[str, ...], tuple[Laws, dict[str, int]]] = {}
        """Laws of workers that were asked about together, and the place of each in them: a choice asks for hundreds,
        and between two of them few have learned."""

    def __repr__(self) -> str:
        return f"<RateBook {len(self._kinds)} workers, {len(self._own)} with rates of their own>"

    def of(self, workers: tuple[str, ...]) -> Laws:
        """Rates of each of ``workers``, valid until a worker learns. Raises KeyError for a worker that never joined."""
        known = self._kept.get(workers)
        if known is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            places = {worker: at for at, worker in enumerate(workers)}
            known = self._kept[workers] = Laws([self._rates(worker) for worker in workers]), places
        return known[0]

    def _rates(self, worker: str) -> Rates:
        return self._own.get(worker) or self._of_kind[self._kinds[worker]]

    def write(self, worker: str, kind: str, *, of_kind: Rates, own: Rates | None) -> None:
        """What ``worker`` and its kind are believed to do from now on; without ``own`` it does what its kind does."""
        self._kinds[worker] = kind
        learned = [worker]
        if self._of_kind.get(kind) != of_kind:
            self._of_kind[kind] = of_kind
            learned += [each for each, its in self._kinds.items() if its == kind and each not in self._own]
        if own is not None:
            self._own[worker] = own
        else:
            self._own.pop(worker, None)
        for laws, places in self._kept.values():
            for each in learned:
                if each in places:
                    laws.write(places[each], self._rates(each))

    def has_own(self, worker: str) -> bool:
        """Whether it was written with rates of its own."""
        return worker in self._own

    def forget(self, worker: str) -> None:
        self._kinds.pop(worker, None)
        self._own.pop(worker, None)
        self._kept.clear()
