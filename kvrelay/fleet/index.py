"""Which P probably holds which pages. Approximate: names that were *sent* there, never proof that a page exists."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvrelay.types import PageName


class SentPages:
    """Names sent to one incarnation of a worker, least recently used first out."""

    def __init__(self, incarnation: str, limit: int) -> None:
        self.incarnation = incarnation
        self._limit = max(1, limit)
        self._names: OrderedDict[PageName, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SentPages {len(self._names)}/{self._limit} of {self.incarnation}>"

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[PageName]) -> None:
        # Deepest first, so that a chain's root is the last to be forgotten: pages without their parents are no prefix.
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._limit:
            self._names.popitem(last=False)

    def prefix(self, names: Sequence[PageName]) -> int:
        """How many of ``names``, from the first on, were sent here."""
        for count, name in enumerate(names):
            if name not in self._names:
                return count
        return len(names)


class PageIndex:
    """``SentPages`` of every P; a restarted worker starts empty."""

    def __init__(self) -> None:
        self._workers: dict[str, SentPages] = {}

    def __repr__(self) -> str:
        return f"<PageIndex {len(self._workers)} workers, {sum(map(len, self._workers.values()))} pages>"

    def add(self, worker: str, incarnation: str, names: Sequence[PageName], limit: int) -> None:
        """Remember that ``names`` went to ``worker``; ``limit`` is how many pages its KV cache can hold."""
        sent = self._workers.get(worker)
        if sent is None or sent.incarnation != incarnation:
            sent = self._workers[worker] = SentPages(incarnation, limit)
        sent.add(names)

    def prefix(self, worker: str, incarnation: str, names: Sequence[PageName]) -> int:
        sent = self._workers.get(worker)
        if sent is None or sent.incarnation != incarnation:
            return 0
        return sent.prefix(names)

    def drop(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Forget what was sent to workers that nobody knows any more."""
        for worker in self._workers.keys() - set(workers):
            del self._workers[worker]
