"""Pages that were sent to a worker and not reported by it yet: a promise, or all that is known of a worker that reports
nothing. It must never count as proof that a page exists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from kvrelay.types import PageName


class SentPages:
    """Names sent to one incarnation of a worker; the least recently sent go when there are too many or time passes."""

    def __init__(self, incarnation: str, limit: int) -> None:
        self.incarnation = incarnation
        self.turned_s = 0.0
        """When ``turn`` was called last; the caller's."""
        self._limit = max(1, limit)
        self._turn = 0
        self._names: dict[PageName, int] = {}
        """In which turn each was sent last, in that order. All at once what can be: a long prompt has hundreds."""

    def __repr__(self) -> str:
        return f"<SentPages {len(self._names)}/{self._limit} of {self.incarnation}>"

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[PageName]) -> None:
        # Deepest first, so that a chain's root is the last to be forgotten: pages without their parents are no prefix.
        fresh = dict.fromkeys(reversed(names), self._turn)
        self._forget(self._names.keys() & fresh.keys())
        self._names.update(fresh)
        if len(self._names) > self._limit:
            self._forget(list(islice(self._names, len(self._names) - self._limit)))

    def prefix(self, names: Sequence[PageName], begin: int = 0) -> int:
        """How many of ``names``, from ``begin`` on, were sent here, one after the other."""
        if begin >= len(names) or names[begin] not in self._names:
            return 0
        # No loop in Python: this is asked for every holder at every choice.
        held = list(map(self._names.__contains__, islice(names, begin, None)))
        return held.index(False) if False in held else len(held)

    def settle(self, names: Iterable[PageName]) -> None:
        """The worker said itself what became of ``names``."""
        if self._names:
            self._forget(self._names.keys() & names)

    def turn(self) -> None:
        """Forget what was sent before the last call: nothing lives for more than two turns."""
        old = takewhile(lambda sent: sent[1] < self._turn, self._names.items())
        self._forget([name for name, _ in old])
        self._turn += 1

    def _forget(self, names: Iterable[PageName]) -> None:
        for name in names:
            del self._names[name]
