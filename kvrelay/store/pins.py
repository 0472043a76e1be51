"""Who holds pages: a pinned page keeps its slot. It counts holds and the order of uses, and decides nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.store.eviction import EvictionOrder
from kvrelay.store.page import Page


class Pins:
    """Holds of all pages of a store. Many at a time, because a transfer is about hundreds."""

    def __init__(self, order: EvictionOrder, page_lease_s: float) -> None:
        self.pinned = 0
        """Pages that somebody holds."""
        self.uses = 0
        """Position that the last use has in the order of uses."""
        self._order = order
        self._page_lease_s = page_lease_s

    def __repr__(self) -> str:
        return f"<Pins {self.pinned} pages>"

    def hold(self, pages: Iterable[Page], now: float) -> None:
        """Keep the slots of ``pages`` until the matching ``release``; counts as a use."""
        for page in pages:
            if not page.pins:
                self.pinned += 1
            page.pins += 1
            self.uses += 1
            page.used = self.uses
            if page.tokens < page.shelf.arena.format.page_tokens:
                page.keep_until = now + self._page_lease_s

    def note_use(self, pages: Iterable[Page], now: float) -> None:
        """``pages`` became whole just now."""
        for page in pages:
            self.uses += 1
            page.used, page.keep_until = self.uses, now + self._page_lease_s
            if not page.pins:
                self._order.offer(page)

    def release(self, pages: Iterable[Page]) -> None:
        """Let go of each once."""
        for page in pages:
            page.pins -= 1
            if not page.pins:
                self.pinned -= 1
                if not page.children:
                    self._order.offer(page)
