"""Order in which pages go when room is needed. It chooses; it never frees anything itself."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvrelay.store.page import Page

_SLACK = 64


class EvictionQueue:
    """Evictable pages by ``key``, lowest first. Entries that went out of date are skipped when met."""

    def __init__(self, key: Callable[[Page], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Page]] = []
        self._order = itertools.count()
        self._compact_at = _SLACK

    def __repr__(self) -> str:
        return f"<EvictionQueue {len(self._heap)} entries>"

    def __contains__(self, page: Page) -> bool:
        return any(entry[2] is page and self._holds(entry) for entry in self._heap)

    def offer(self, page: Page) -> None:
        """Note that ``page`` is evictable under its present key."""
        heapq.heappush(self._heap, (self._key(page), next(self._order), page))
        if len(self._heap) > self._compact_at:
            self._compact()

    def first(self) -> Page | None:
        """The page to go first; it stays in the queue until it is no longer evictable."""
        while self._heap:
            if self._holds(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def _holds(self, entry: tuple[float, int, Page]) -> bool:
        return entry[2].is_evictable and entry[0] == self._key(entry[2])

    def _compact(self) -> None:
        live = {id(entry[2]): entry for entry in self._heap if self._holds(entry)}
        self._heap = list(live.values())
        heapq.heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK


class EvictionOrder:
    """Partial pages past their lease, then the least recently used, then partial pages that still have some."""

    def __init__(self) -> None:
        self._partial = EvictionQueue(lambda page: page.keep_until)
        self._full = EvictionQueue(lambda page: page.used)

    def __repr__(self) -> str:
        return f"<EvictionOrder partial {self._partial!r}, full {self._full!r}>"

    def __contains__(self, page: Page) -> bool:
        return page in (self._partial if page.is_partial else self._full)

    def offer(self, page: Page) -> None:
        """Consider ``page`` if it can go now; call again whenever it may have become so."""
        if page.is_evictable:
            (self._partial if page.is_partial else self._full).offer(page)

    def first(self, now: float) -> Page | None:
        """The page to evict next; None when everything is pinned, arriving or the parent of such."""
        partial = self._partial.first()
        if partial is not None and partial.keep_until <= now:
            return partial
        return self._full.first() or partial
