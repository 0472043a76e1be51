"""Pages of one arena that are being filled, and what came in since the last look: one vectorised scan, no message."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvrelay.store.arena import Arena, Ints
from kvrelay.store.page import Page

_NOTHING: Ints = np.empty(0, np.int64)


class Filling:
    """The announced, unfinished pages of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pages: dict[Page, None] = {}
        self._listed: list[Page] = []
        self._slots = self._generations = self._counts = _NOTHING
        self._changed = False

    def __repr__(self) -> str:
        return f"<Filling {len(self._pages)} pages>"

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: Page) -> bool:
        return page in self._pages

    def add(self, page: Page) -> None:
        self._pages[page] = None
        self._changed = True

    def discard(self, pages: Iterable[Page]) -> None:
        """Look at these no more."""
        for page in pages:
            if self._pages.pop(page, page) is None:
                self._changed = True

    def keep(self, pages: Iterable[Page], now: float) -> None:
        """These are still expected, though nothing came in for them."""
        for page in pages:
            page.moved_at = now

    def stalled(self, before: float) -> list[Page]:
        """Pages that got no layer, and were not kept, since ``before``."""
        return [page for page in self._pages if page.moved_at < before]

    def scan(self, now: float) -> tuple[list[Page], bool]:
        """Pages that are whole now, and whether any page moved at all."""
        if not self._pages:
            return [], False
        if self._changed:
            self._relist()
        counts = self._arena.ready_layers(self._slots, self._generations).sum(axis=0)
        moved = np.flatnonzero(counts != self._counts).tolist()
        if not moved:
            return [], False
        for index in moved:
            page = self._listed[index]
            page.layers_in, page.moved_at = int(counts[index]), now
        self._counts = counts
        whole = np.flatnonzero(counts == self._arena.format.layers).tolist()
        return [self._listed[index] for index in whole], True

    def _relist(self) -> None:
        self._listed = list(self._pages)
        self._slots = np.array([page.ref.slot for page in self._listed], np.int64)
        self._generations = np.array([page.ref.generation for page in self._listed], np.int64)
        self._counts = np.array([page.layers_in for page in self._listed], np.int64)
        self._changed = False
