"""Pages of one push that others are bringing to its receiver: which of them came, and which are to be offered again.

It must never let a page be offered for ever: one whose bringers keep dying is computed by who wanted it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvrelay.store.page import Page
from kvrelay.store.transfers import Transfer
from kvrelay.types import PageName

MAX_OFFERS = 4
"""Of one page by one push: each one after the first means that somebody who was bringing it has died."""


class News(NamedTuple):
    """What became of pages that others were bringing, by their positions among the names of the transfer."""

    over: list[int]
    """Their sender need not hold them any more."""
    lacking: list[int]
    """They did not come."""


class Elsewhere:
    """As the receiver keeps book of it."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._held: dict[PageName, int] = {}
        """Pages that the sender holds, by name."""
        self._offers: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Elsewhere {len(self._held)} pages that others bring>"

    def hold(self, offered: Sequence[int], found: Iterable[Page | None]) -> list[int]:
        """These were offered, and ``found`` here so; those that the sender is to hold."""
        self._offers.update(offered)
        held = {
            page.name: index
            for index, page in zip(offered, found, strict=True)
            if page is not None and self._may_come(page) and self._offers[index] < MAX_OFFERS
        }
        self._held |= held
        self._transfer.gone -= held.keys()  # that was before they were found here
        return list(held.values())

    def _may_come(self, page: Page) -> bool:
        """Of a page that its transfer does not wait for there would be no news."""
        return page.is_being_written and page.name in self._transfer.expected

    def news(self) -> News:
        """What became of pages since the last call. Of a transfer that ended, none need be held."""
        lost = self._transfer.gone & self._held.keys()
        self._transfer.gone.clear()
        over = self._held.keys() - self._transfer.expected - lost
        return News(self._drop(over), self._drop(lost))

    def _drop(self, names: Iterable[PageName]) -> list[int]:
        return sorted(self._held.pop(name) for name in names)
