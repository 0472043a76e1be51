"""Pages by name: the copy that readers find, and spare ones in the making. It never touches a slot.

Two writers may fill the same page at the same time; the second copy is of use when the first one fails, or is slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.store.arena import SlotState
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
        self._followers: dict[Page, set[Page]] = {}
        """Of found pages that are filling, those that continue them: another copy may come to be their parent."""

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
            self._bind(page, parent)

    def add_first(self, names: Sequence[PageName], pages: Sequence[Page], parents: Sequence[PageName | None]) -> None:
        """``add`` for pages of one chain of whose names there are none yet; ``parents`` by name."""
        self.found.update(zip(names, pages, strict=True))
        for page, name in zip(pages, parents, strict=True):
            parent = None if name is None else self.found.get(name)
            if parent is not None:
                self._bind(page, parent)

    def _bind(self, page: Page, parent: Page) -> None:
        page.parent = parent
        parent.children += 1
        if parent.state is SlotState.FILLING:
            self._followers.setdefault(parent, set()).add(page)

    def remove(self, page: Page) -> None:
        """It is of no use, or no more."""
        if self.found.get(page.name) is page:
            del self.found[page.name]
        spares = self.spare.get(page.name, [])
        if page in spares:
            spares.remove(page)
        if not spares:
            self.spare.pop(page.name, None)
        self._followers.pop(page, None)
        parent, page.parent = page.parent, None
        if parent is not None:
            parent.children -= 1
            if parent in self._followers:
                self._followers[parent].discard(page)
            self._order.offer(parent)

    def promote(self, page: Page) -> None:
        """A spare copy is the one that is found from now on; there is no other."""
        self.remove(page)
        self.add(page, None)

    def settle(self, whole: Sequence[Page]) -> list[Page]:
        """Those of these whole pages that are found from now on; a copy of each other one was whole before."""
        for page in whole:
            self._followers.pop(page, None)
        return [page for page in whole if self.found.get(page.name) is page or self._is_settled(page)]

    def _is_settled(self, page: Page) -> bool:
        found = self.found.get(page.name)
        if found is None:  # the copy that this one was spare to is gone already
            self.promote(page)
        elif found.state is SlotState.FILLING:
            self._swap(page, found)
        return self.found[page.name] is page

    def _swap(self, page: Page, found: Page) -> None:
        """``page`` is found from now on, and the parent of what follows ``found``, which is spare: without children
        ``page`` would be evicted before what is of no use without it."""
        children, parent = self._followers.pop(found, set()), found.parent
        self.remove(found)
        self.remove(page)
        self.add(page, parent)
        for child in children:
            child.parent = page
        page.children, found.children = found.children, 0
        self.add(found, None)

    def first_spare(self, name: PageName) -> Page | None:
        """The oldest spare copy."""
        spares = self.spare.get(name)
        return spares[0] if spares else None

    def check_invariants(self, known: list[Page]) -> None:
        """Raise AssertionError unless each of ``known``, all pages that have a slot, knows who continues it, and can be
        evicted when nothing does."""
        for page in known:
            assert page.children == sum(other.parent is page for other in known), f"{page} miscounts its children"
            assert not page.is_evictable or page in self._order, f"{page} can never be evicted"
        for page, followers in self._followers.items():
            assert page.state is SlotState.FILLING, f"{page} will not be overtaken any more"
            assert self.found.get(page.name) is page, f"{page} is found by nobody"
            assert page.children == len(followers), f"{page} does not know who follows it"
            assert all(follower.parent is page for follower in followers), f"{page} knows of others' followers"
