"""Prefixes that a worker computes or a store pushes right now, found by the names of their pages. It must never be
taken for pages that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.types import PageName

MAX_NAMES = 1 << 18
"""Pages under way that are remembered, 8 million tokens; of what comes on top nobody is told."""
MOST_WORKS = 4
"""Works that one prompt is told of, those with the longest prefixes."""


@dataclass(slots=True, eq=False)
class Work:
    """A prompt that a worker computes, or pages that a store pushes to another."""

    key: str
    """Its transfer; the request's id where a decode worker computes its own prompt."""
    names: tuple[PageName, ...]
    """Names of the prompt's full pages, from the first one on."""
    first: int
    """How many of them are there already."""
    worker: str | None
    """The worker in whose cache the pages will be; None for a push."""
    stores: frozenset[str]
    """Stores that will have the pages, as the index calls them."""
    begin_s: float
    """When it begins, on the clock of ``now``; predicted until that is known."""
    seconds: float
    """Predicted time from the beginning to the last page."""

    @property
    def coming(self) -> tuple[PageName, ...]:
        return self.names[self.first :]

    def remaining_s(self, pages: int, now: float) -> float:
        """Until the first ``pages`` are there. What is late is expected to be late by as much again."""
        share = (pages - self.first) / (len(self.names) - self.first)
        return abs(self.begin_s + share * self.seconds - now)


class Underway:
    """All works of one router."""

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}
        self._by_page: dict[PageName, Work] = {}
        """The work that was the first to bring each page."""
        self._others: dict[PageName, list[Work]] = {}
        """Other works that bring each page, in the order in which they began."""
        self._announced = 0
        """Pages of all works, those counted twice that two of them bring."""

    def __repr__(self) -> str:
        return f"<Underway {len(self._works)} works, {len(self._by_page)} pages>"

    def __len__(self) -> int:
        return len(self._works)

    def get(self, key: str) -> Work | None:
        return self._works.get(key)

    def begin(self, work: Work) -> None:
        """Its pages will come. Nothing, when none is lacking or there are too many."""
        coming = work.coming
        if not coming or self._announced + len(coming) > MAX_NAMES:
            return
        self.end(work.key)
        self._works[work.key] = work
        self._announced += len(coming)
        for name in coming:
            if self._by_page.setdefault(name, work) is not work:
                self._others.setdefault(name, []).append(work)

    def started(self, key: str, now: float) -> None:
        """It begins only now, or has already."""
        work = self._works.get(key)
        if work is not None:
            work.begin_s = now

    def end(self, key: str) -> None:
        """It is over, in whatever way."""
        work = self._works.pop(key, None)
        if work is None:
            return
        self._announced -= len(work.coming)
        for name in work.coming:
            others = self._others.get(name)
            if others is not None:
                self._leave_to(others, name, work)
            else:
                self._by_page.pop(name, None)

    def _leave_to(self, others: list[Work], name: PageName, work: Work) -> None:
        if self._by_page[name] is work:
            self._by_page[name] = others.pop(0)
        else:
            others.remove(work)
        if not others:
            del self._others[name]

    def find(self, names: Sequence[PageName]) -> list[tuple[Work, int]]:
        """Works that bring pages of a prompt, the longest prefix first, and how long a prefix each one brings."""
        bringing = list(map(self._by_page.get, reversed(names)))
        works = [work for work in dict.fromkeys(bringing) if work is not None]
        return [(work, len(names) - bringing.index(work)) for work in works[:MOST_WORKS]]

    def check_invariants(self) -> None:
        """Raise AssertionError unless exactly the pages of open works are announced."""
        brought = list(self._by_page.items())
        brought += [(name, work) for name, others in self._others.items() for work in others]
        coming = {(name, work) for work in self._works.values() for name in work.coming}
        assert set(brought) == coming, "not the pages of open works"
        assert len(brought) == len(coming) == self._announced, "pages are miscounted"
