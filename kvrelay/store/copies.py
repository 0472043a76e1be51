"""Pages by name: the copy that readers find, and spare ones in the making. It never touches a slot.

Two writers may fill the same page at the same time; the second copy is of use when the first one fails, or is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.store.eviction import EvictionOrder
from kvrelay.store.page import Page
from kvrelay.types import PageName


class Copies:
    """All pages that are filling or complete."""

    def __init__(self, order: EvictionOrder) -> None:
        self.found: dict[PageName, Page] = {}
        self.spare: dict[PageName, list[Page]] = {}
        """Being filled, all of them: the first one that is whole is found, and the others are freed when they are."""
        self._order = order

    def __repr__(self) -> str:
        return f"<Copies {len(self.found)} pages, {sum(map(len, self.spare.values()))} spares>"

    def add(self, page: Page, parent: Page | None) -> None:
        """A page begins; ``parent``: the one before it in its chain, if it is known."""
        if page.name in self.found:
            self.spare.setdefault(page.name, []).append(page)
            return
        self.found[page.name] = page
        # Only a page that is here already can become a parent, so that chains never close to a circle.
        if parent is not None and self.found.get(parent.name) is parent and parent is not page:
            page.parent = parent
            parent.children += 1

    def add_first(self, names: Sequence[PageName], pages: Sequence[Page], parents: Sequence[PageName | None]) -> None:
        """``add`` for pages of one chain of whose names there are none yet; ``parents`` by name."""
        self.found.update(zip(names, pages, strict=True))
        for page, name in zip(pages, parents, strict=True):
            parent = None if name is None else self.found.get(name)
            if parent is not None:
                page.parent = parent
                parent.children += 1

    def remove(self, page: Page) -> None:
        """It is of no use, or no more."""
        if self.found.get(page.name) is page:
            del self.found[page.name]
        spares = self.spare.get(page.name, [])
        if page in spares:
            spares.remove(page)
        if not spares:
            self.spare.pop(page.name, None)
        parent, page.parent = page.parent, None
        if parent is not None:
            parent.children -= 1
            self._order.offer(parent)

    def promote(self, page: Page) -> None:
        """A spare copy is the one that is found from now on; there is no other."""
        self.remove(page)
        self.add(page, None)

    def swap(self, page: Page) -> None:
        """A spare copy is found from now on, and the one that was found before is spare."""
        found = self.found[page.name]
        parent = found.parent
        self.remove(found)
        self.remove(page)
        self.add(page, parent)
        self._adopt(page, found)
        self.add(found, None)

    def _adopt(self, page: Page, overtaken: Page) -> None:
        """``page`` is the parent of what ``overtaken`` was: or it would be evicted before what is no use without it."""
        for child in reversed(self.found.values()):  # they came after it, and seldom long after
            if not overtaken.children:
                return
            if child.parent is overtaken:
                child.parent = page
                page.children += 1
                overtaken.children -= 1

    def first_spare(self, name: PageName) -> Page | None:
        """The oldest spare copy."""
        spares = self.spare.get(name)
        return spares[0] if spares else None
