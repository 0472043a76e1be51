"""What is believed of each worker as plain numbers, always at hand. It must never show what was before."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvrelay.policy.fit import Fit
from kvrelay.policy.perf import Perf, Rates


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

    def __repr__(self) -> str:
        return f"<RateBook {len(self._kinds)} workers, {len(self._own)} with rates of their own>"

    def of(self, workers: Iterable[str]) -> list[Rates]:
        """Of each. Raises KeyError for one that never joined."""
        own, of_kind, kinds = self._own, self._of_kind, self._kinds
        return [own.get(worker) or of_kind[kinds[worker]] for worker in workers]

    def write(self, worker: str, kind: str, *, of_kind: Rates, own: Rates | None) -> None:
        """What ``worker`` and its kind are believed to do from now on; without ``own`` it does what its kind does."""
        self._kinds[worker], self._of_kind[kind] = kind, of_kind
        if own is not None:
            self._own[worker] = own

    def forget(self, worker: str) -> None:
        self._kinds.pop(worker, None)
        self._own.pop(worker, None)
