"""All outgoing transfers: which of them waits for which page. It decides nothing about order or links."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvrelay.store.catalog import Catalog
from kvrelay.store.page import Page
from kvrelay.store.push import GIVEN_UP, Push
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer
from kvrelay.types import PageName


class Pushes:
    """Pushes by transfer, and by the names of pages that are not here yet."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._pushes: dict[str, tuple[Push, Shelf, Callable[[], None]]] = {}
        self._awaited: dict[PageName, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"<Pushes {len(self._pushes)} open>"

    def __len__(self) -> int:
        return len(self._pushes)

    def add(self, push: Push, shelf: Shelf, wake: Callable[[], None], now: float) -> None:
        """Start ``push``: offer what is here, wait for the rest. ``wake`` is called whenever it can go on."""
        self._pushes[push.transfer.id] = (push, shelf, wake)
        push.pages_here([page for name in push.absent if (page := self._catalog.find(name)) is not None], now)
        for name in push.absent:
            self._awaited.setdefault(name, {})[push.transfer.id] = None
        wake()

    def expect_no_more(self, push: Push) -> None:
        """Pages that ``push`` still waits for will not come: it ends with those that are here."""
        self._forget_waits(push)
        push.give_up_absent()
        self._pushes[push.transfer.id][2]()

    def pages_here(self, pages: Iterable[Page], now: float) -> None:
        """Pages began to exist."""
        if not self._awaited:
            return
        for page in pages:
            for id in self._awaited.pop(page.name, ()):
                push, _shelf, wake = self._pushes[id]
                push.pages_here((page,), now)
                wake()

    def page_failed(self, page: Page, now: float) -> None:
        """A page was given up: pushes that hold it go on with another copy, or cannot be completed."""
        copy = self._catalog.find(page.name)
        for push, _shelf, wake in self._pushes.values():
            if push.holds(page):
                if copy is None and push.is_elsewhere(page):
                    continue  # it may come to the peer without this store
                if copy is None or not push.replace(page, copy, now):
                    push.problem = GIVEN_UP
                wake()

    def fail(self, transfer: Transfer) -> None:
        """The transfer has failed for another reason: its link is to say so to the peer."""
        entry = self._pushes.get(transfer.id)
        if entry is not None and not entry[0].problem:
            entry[0].problem = "the transfer was given up"
            entry[2]()

    def wake(self, shelf: Shelf) -> None:
        """Layers came in on ``shelf``."""
        for push, its_shelf, wake in self._pushes.values():
            if its_shelf is shelf:
                push.note_progress()
                if push.is_sending:
                    wake()

    def remove(self, push: Push) -> None:
        """``push`` has ended, one way or another."""
        self._forget_waits(push)
        self._pushes.pop(push.transfer.id, None)
        push.close()

    def _forget_waits(self, push: Push) -> None:
        for name in push.absent:
            waiting = self._awaited.get(name, {})
            waiting.pop(push.transfer.id, None)
            if not waiting:
                self._awaited.pop(name, None)
