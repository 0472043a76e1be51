"""Which page lives in which slot, from grant to eviction. Pure state: time comes in as ``now``, nothing waits.

It must never hand out a slot that somebody may still read under a pin or write into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from kvrelay.protocol.client import NewPage
from kvrelay.store.arena import SlotState
from kvrelay.store.copies import Copies
from kvrelay.store.counts import Counts
from kvrelay.store.eviction import EvictionOrder
from kvrelay.store.filling import Filling
from kvrelay.store.page import FOREVER, Coming, Page, Writer
from kvrelay.store.pins import Pins
from kvrelay.store.room import Room
from kvrelay.store.shelf import Shelf
from kvrelay.types import PageName, SlotRef

QUARANTINE_S = 1.0
"""How long a given-up slot rests. A lost writer may be alive behind a broken link, in the middle of a copy.

It looks at its slots' generations before every copy of a layer (``Arena.current``): what it had begun when its link
broke takes milliseconds, however long the forward pass is that it belongs to, and nothing follows.
"""


class Catalog:
    """All pages of a store."""

    def __init__(self, room: Room, counts: Counts, page_lease_s: float) -> None:
        self.room = room
        self.counts = counts
        self.failed: dict[Page, None] = {}
        """Given-up pages, and whole ones that another copy came before, whose slot somebody may still touch."""
        self.on_complete: Callable[[list[Page]], None] = lambda pages: None
        self.on_failed: Callable[[Page], None] = lambda page: None
        self.on_gone: Callable[[list[Page]], None] = lambda pages: None
        """Pages that were complete are found no more."""
        self._slots: defaultdict[Shelf, dict[int, Page]] = defaultdict(dict)
        """Every announced page by its slot, until that is free."""
        self._filling: dict[Shelf, Filling] = {}
        self._page_lease_s = page_lease_s
        self._order = EvictionOrder()
        self.copies = Copies(self._order)
        self.pins = Pins(self._order, page_lease_s)

    def __repr__(self) -> str:
        return f"<Catalog {self.copies!r}, {self.pins!r}, {len(self.failed)} failed, {self.room!r}>"

    # ------------------------------------------------------------ writing

    def grant(self, writer: Writer, shelf: Shelf, count: int, now: float) -> list[SlotRef]:
        """Up to ``count`` empty slots, evicting what must go for them."""
        refs = self.take(shelf, count, now)
        writer.granted.update(dict.fromkeys(refs, shelf))
        return refs

    def take(self, shelf: Shelf, count: int, now: float) -> list[SlotRef]:
        """``grant`` for pages that begin at once, with ``receive``."""
        return self.room.take(shelf, count, lambda lacking: self._evict(shelf, lacking, now))

    def announce(self, writer: Writer, new: NewPage, parent: Page | None, now: float) -> Page | None:
        """A granted slot starts to be filled as ``new``. None, and counted, when it was not granted to ``writer``."""
        shelf = writer.granted.pop(new.slot, None)
        if shelf is None:
            self.counts.add("stale_refs")
            return None
        shelf.arena.set_tokens(new.slot.slot, new.tokens)
        page = Page(new.name, shelf, new.slot, new.tokens, writer, now, new.shards)
        self._slots[shelf][new.slot.slot] = page
        self.copies.add(page, parent)
        writer.filling.add(page)
        self.filling(shelf).watch(page)
        return page

    def receive(self, writer: Writer, shelf: Shelf, coming: Coming, now: float) -> list[Page]:
        """Slots that were taken start to be filled by ``writer``, who tells when they are whole: see ``filled``.

        They are pinned.
        """
        slots = [ref.slot for ref in coming.refs]
        shelf.arena.set_tokens(slots, coming.tokens)
        pages = [
            Page(name, shelf, ref, tokens, writer, now, coming.shards)
            for name, ref, tokens in zip(coming.names, coming.refs, coming.tokens, strict=True)
        ]
        self._slots[shelf].update(zip(slots, pages, strict=True))
        self.copies.add_first(coming.names, pages, coming.parents)
        self.pins.hold(pages, now)
        writer.filling.update(pages)
        self.filling(shelf).expect(pages)
        return pages

    def filled(self, shelf: Shelf, pages: list[Page], now: float) -> None:
        """Every layer of these pages, that their writer was to tell of, is in."""
        self.filling(shelf).discard(pages)
        self._finish(shelf, pages, now)

    def filling(self, shelf: Shelf) -> Filling:
        """Unfinished pages of a shelf."""
        if shelf not in self._filling:
            self._filling[shelf] = Filling(shelf.arena)
        return self._filling[shelf]

    def progress(self, now: float) -> list[Shelf]:
        """Take note of layers that came in; the shelves where any did."""
        moved: list[Shelf] = []
        for shelf, filling in list(self._filling.items()):
            whole, any_moved = filling.scan(now)
            self._finish(shelf, whole, now)
            if any_moved:
                moved.append(shelf)
        return moved

    def fail(self, page: Page, free_at: float) -> None:
        """Give a filling page up. Its slot stays out of use until ``free_at`` and while it is pinned.

        ``FOREVER``: until its writer has finished it after all, or is lost.
        """
        page.free_at = free_at
        if free_at != FOREVER:
            self.filling(page.shelf).discard([page])
            page.writer.filling.discard(page)
        if page.state is not SlotState.FILLING:
            return
        page.state = SlotState.FAILED
        page.shelf.arena.set_state(page.ref.slot, SlotState.FAILED)
        self.failed[page] = None
        self.counts.add("pages_failed")
        self._replace(page)
        self.on_failed(page)

    def in_slot(self, shelf: Shelf, ref: SlotRef) -> Page | None:
        """The page that ``ref`` means, if it still means one."""
        page = self._slots[shelf].get(ref.slot)
        return page if page is not None and page.ref == ref else None

    def condemn(self, page: Page, now: float) -> None:
        """A whole page turned out damaged: it is found no more, and its slot is free once nobody pins it."""
        page.state, page.free_at = SlotState.FAILED, now
        page.shelf.arena.set_state(page.ref.slot, SlotState.FAILED)
        self.failed[page] = None
        self.counts.add("pages_damaged")
        if self.copies.found.get(page.name) is page:
            self.on_gone([page])
        self._replace(page)

    def keep(self, pages: Iterable[Page], now: float) -> None:
        """These are still expected, though nothing came in for them: see ``fail_stalled``."""
        for page in pages:
            page.moved_at = now

    def fail_stalled(self, before: float) -> None:
        """Give up pages without a new layer since ``before``; their slots wait for their writers."""
        for filling in self._filling.values():
            for page in filling.stalled(before):
                self.fail(page, FOREVER)

    def lose(self, writer: Writer, free_at: float) -> None:
        """``writer`` is gone: nothing it had begun will be finished."""
        for page in list(writer.filling):
            self.fail(page, free_at)
        for ref, shelf in writer.granted.items():
            page = Page(PageName(b""), shelf, ref, 0, writer, 0.0, state=SlotState.FAILED, free_at=free_at)
            shelf.arena.set_state(ref.slot, SlotState.FAILED)
            self.failed[page] = None
        writer.granted.clear()

    def sweep(self, now: float) -> int:
        """Free the slots of failed pages that nobody touches any more; how many."""
        untouched = [page for page in self.failed if page.free_at <= now and page.pins == 0]
        for page in untouched:
            del self.failed[page]
        self._free(untouched)
        return len(untouched)

    # ------------------------------------------------------------ reading

    def find(self, name: PageName) -> Page | None:
        """The page, complete or filling."""
        return self.copies.found.get(name)

    def are_complete(self, names: Iterable[PageName]) -> list[bool]:
        """Of each name, whether its page is complete here."""
        find = self.copies.found.get
        return [(page := find(name)) is not None and page.state is SlotState.COMPLETE for name in names]

    def lacking(self, names: Iterable[PageName]) -> set[PageName]:
        """Those of which the page is not complete here."""
        find = self.copies.found.get
        return {name for name in names if (page := find(name)) is None or page.state is not SlotState.COMPLETE}

    # ------------------------------------------------------------ inside

    def _finish(self, shelf: Shelf, whole: list[Page], now: float) -> None:
        """These pages of ``shelf`` came to their end, even if they had been given up."""
        finished = [page for page in whole if page.state is SlotState.FILLING]
        shelf.arena.set_states([page.ref.slot for page in finished], SlotState.COMPLETE)
        for writer in {page.writer for page in whole}:
            writer.filling.difference_update(whole)
        if len(finished) < len(whole):
            for page in whole:
                if page.state is SlotState.FAILED:
                    page.free_at = now  # its writer came to an end after all
        for page in finished:
            page.state = SlotState.COMPLETE
        self.pins.note_use(finished, now)
        stored = self.copies.settle(finished)
        if len(stored) < len(finished):
            kept = set(stored)
            self._drop([page for page in finished if page not in kept])
        if stored:
            self.counts.add("pages_put", len(stored))
            self.on_complete(stored)

    def _drop(self, pages: list[Page]) -> None:
        """Free the slots of whole pages, of which others were whole before, once they can be."""
        for page in pages:
            self.copies.remove(page)
            if page.pins:  # by somebody who found it before the other one was whole, and may still read it
                self.failed[page] = None
            else:
                self._free([page])

    def _replace(self, page: Page) -> None:
        """Find ``page`` no more, but its oldest spare copy if there is one."""
        self.copies.remove(page)
        spare = self.copies.first_spare(page.name)
        if spare is not None and page.name not in self.copies.found:
            self.copies.promote(spare)

    def _free(self, pages: list[Page]) -> None:
        slots: dict[Shelf, list[int]] = {}
        for page in pages:
            page.state = SlotState.FREE
            self._slots[page.shelf].pop(page.ref.slot, None)
            slots.setdefault(page.shelf, []).append(page.ref.slot)
        for shelf, freed in slots.items():
            shelf.free(freed)

    def _evict(self, shelf: Shelf, most: int, now: float) -> bool:
        """Free up to ``most`` slots of ``shelf``, in the order of eviction, or the first one if it is of another shelf.

        Many at a time: a full store makes room for every page that it takes in.
        """
        if self.sweep(now):
            return True
        gone: list[Page] = []
        while len(gone) < most and (page := self._order.first(now)) is not None:
            if page.shelf is not shelf and gone:
                break
            self.copies.remove(page)  # its parent may be the next
            page.state = SlotState.FREE
            gone.append(page)
            if page.shelf is not shelf:
                break
        if gone:
            self.on_gone(gone)
            self._free(gone)
            self.counts.add("pages_evicted", len(gone))
        return bool(gone)

    # ------------------------------------------------------------ checks

    def gauges(self) -> dict[str, int]:
        """What is here now."""
        shelves = self.room.shelves.values()
        return {
            "pages_used": len(self.copies.found),
            "pages_capacity": sum(shelf.arena.slots for shelf in shelves),
            "pages_filling": sum(len(filling) for filling in self._filling.values()),
            "pages_pinned": self.pins.pinned,
            "slots_failed": len(self.failed),
            "slots_occupied": sum(shelf.occupied for shelf in shelves),
            "bytes_used": self.room.occupied_bytes,
            "bytes_resident": self.room.resident_bytes,
            "bytes_capacity": self.room.budget_bytes,
        }

    def check_invariants(self, writers: Iterable[Writer]) -> None:
        """Raise AssertionError unless every slot is accounted for once and every unpinned whole page can go."""
        spares = [page for pages in self.copies.spare.values() for page in pages]
        known = [*self.copies.found.values(), *spares, *self.failed]
        granted = [(shelf, ref.slot) for writer in writers for ref, shelf in writer.granted.items()]
        for shelf in self.room.shelves.values():
            held = [page.ref.slot for page in known if page.shelf is shelf]
            shelf.check_invariants(held + [slot for owner, slot in granted if owner is shelf])
        self.copies.check_invariants(known)
        assert self.room.resident_bytes <= self.room.budget_bytes, "over the budget"
        announced = {(page.shelf, page.ref.slot): page for page in known if page.name}
        in_slots = {(shelf, slot): page for shelf, pages in self._slots.items() for slot, page in pages.items()}
        assert in_slots == announced, "a page is not found in its slot"
        assert self.pins.pinned == sum(page.pins > 0 for page in known), "pins miscounted"
        for page in known:
            assert page.pins >= 0, f"{page} is unpinned too often"
            assert page.state is page.shelf.arena.state(page.ref), f"{page} differs from its slot"
