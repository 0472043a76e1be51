"""The store's state as one whole: catalog, leases, transfers and owners, wired together. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvrelay.config import StoreConfig
from kvrelay.errors import Malformed
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.client import Acquire, Acquired, Announce, Held, NewPage
from kvrelay.protocol.feed import TransferEvent
from kvrelay.store.arena import SlotState
from kvrelay.store.catalog import QUARANTINE_S, Catalog
from kvrelay.store.copying import read_page
from kvrelay.store.counts import Counts
from kvrelay.store.leases import Leases
from kvrelay.store.page import Coming, Page, Writer
from kvrelay.store.pushes import Pushes
from kvrelay.store.room import Room
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer, Transfers, Way
from kvrelay.types import Medium, PageFormat, PageName, SlotRef

NAME_BYTES = 16
MAX_ID_LENGTH = 256
"""Of transfers and leases."""
FILL_STALL_S = 30.0
"""A page that gets no layer for so long is given up; a chunk's forward pass takes seconds at most."""


def incarnation(epoch: int) -> str:
    """Incarnation of the store whose arenas have ``epoch``."""
    return f"{epoch:012x}"


class Keeper:
    """Everything a store knows. Callers pass the time and one clock throughout."""

    def __init__(self, name: str, config: StoreConfig, epoch: int, emit: Callable[[TransferEvent], None]) -> None:
        self.name = name
        self.counts = Counts()
        self.room = Room(config.arena_bytes, epoch)
        self.catalog = Catalog(self.room, self.counts, config.page_lease_s)
        self.leases = Leases(self.catalog)
        self.transfers = Transfers(name, self.counts, emit, self.catalog.lacking)
        self.pushes = Pushes(self.catalog)
        self.links: Callable[[], dict[str, int]] = dict
        """What the rim counts of its links."""
        self.writers: dict[Writer, None] = {}
        self._owners: dict[str, int] = {}
        self._now = 0.0
        self.page_log = PageLog(incarnation(epoch))
        """What routers are told of the pages here."""
        self.catalog.on_complete = self._pages_complete
        self.catalog.on_gone = lambda pages: self.page_log.remove([page.name for page in pages], Medium.MEMORY)
        self.catalog.on_failed = self._page_failed
        self.transfers.on_failed = self.pushes.fail

    def __repr__(self) -> str:
        return (
            f"<Keeper {self.name}: {self.catalog!r}, {self.leases!r}, {self.transfers!r}, {len(self._owners)} owners>"
        )

    # ------------------------------------------------------------ who is here

    def join(self, label: str, now: float) -> Writer:
        """Somebody who may write."""
        self._now = now
        writer = Writer(label)
        self.writers[writer] = None
        return writer

    def leave(self, writer: Writer, now: float, quarantine_s: float = QUARANTINE_S) -> None:
        """A writer's link is gone: what it had begun fails, and nothing is held for it any more."""
        self._now = now
        self.writers.pop(writer, None)
        self.leases.release_all(writer)
        self.transfers.fail_all(writer, now)
        self.catalog.lose(writer, now + quarantine_s)
        self.catalog.sweep(now)

    def attach_owner(self, owner: str) -> None:
        """One more link of ``owner``."""
        self._owners[owner] = self._owners.get(owner, 0) + 1

    def detach_owner(self, owner: str) -> None:
        """One link fewer."""
        self._owners[owner] -= 1
        if self._owners[owner] == 0:
            del self._owners[owner]
            self.counts.add("owners_lost")

    # ------------------------------------------------------------ pages

    def announce(self, writer: Writer, message: Announce, format: PageFormat, now: float) -> None:
        """Pages that a client starts to fill. Raises ``Malformed`` on one that cannot exist."""
        page_tokens, kv_heads = format.page_tokens, format.kv_heads
        self._now = now
        before: Page | None = None
        for new in message.pages:
            check_names((new.name,))
            if not 0 < new.tokens <= page_tokens:
                raise Malformed(f"a page of {new.tokens} tokens does not exist; pages have up to {page_tokens}")
            check_shards(new.shards, kv_heads)
            parent = before if new.parent is None else self.catalog.find(new.parent)
            before = self.begin(writer, new, parent, now)
        self.transfers.touch(message.transfer, now)
        self.progress(now)

    def begin(self, writer: Writer, new: NewPage, parent: Page | None, now: float) -> Page | None:
        """A granted slot starts to be filled; pushes that wait for the page hear of it."""
        page = self.catalog.announce(writer, new, parent, now)
        if page is not None and self.catalog.find(new.name) is page:
            self.pushes.pages_here((page,), now)
        return page

    def receive(self, writer: Writer, shelf: Shelf, coming: Coming, now: float) -> list[Page]:
        """``begin`` for pages that come from another store, with slots that were taken for them. They are pinned."""
        pages = self.catalog.receive(writer, shelf, coming, now)
        self.pushes.pages_here(pages, now)
        return pages

    def received(self, shelf: Shelf, whole: list[Page], now: float) -> None:
        """Layers came in from another store; these pages are whole now."""
        self._now = now
        self.catalog.filled(shelf, whole, now)
        self.pushes.wake(shelf)

    def progress(self, now: float) -> None:
        """Take note of layers that came in, and let the pushes that wait for them go on."""
        self._now = now
        for shelf in self.catalog.progress(now):
            self.pushes.wake(shelf)

    def suspect(self, owner: str, shelf: Shelf, slots: Sequence[SlotRef], now: float) -> None:
        """``owner`` says that these slots hold wrong bytes, or that it will never fill them.

        What another is writing stays: only its owner knows whether it goes on, and its checksums speak for the rest.
        """
        self._now = now
        for ref in slots:
            page = self.catalog.in_slot(shelf, ref)
            if page is None:
                continue
            if not page.is_being_written:
                self.inspect(page, now)
            elif page.writer.label == owner:
                self.catalog.fail(page, now + QUARANTINE_S)
        self.catalog.sweep(now)

    def inspect(self, page: Page, now: float) -> None:
        """Look at a whole page that somebody found damaged; one that proves right stays."""
        if page.state is SlotState.COMPLETE and read_page(page.shelf.arena, page.ref, page.tokens, page.shards) is None:
            self.catalog.condemn(page, now)

    def acquire(self, writer: Writer, message: Acquire, now: float) -> Acquired:
        """Pin what is here or arriving. Raises ``Overloaded``, ``Malformed``."""
        check_id(message.lease)
        self.progress(now)
        pages = [self.catalog.find(name) for name in message.names]
        found = [page for page in pages if page is not None]
        if found:
            self.leases.hold(writer, message.lease, found, message.ttl_s, now)
        missing = [name for name, page in zip(message.names, pages, strict=True) if page is None]
        waiting = bool(missing) and self.transfers.may_bring(message.transfers, missing)
        return Acquired(id=message.id, pages=[None if page is None else _held(page) for page in pages], waiting=waiting)

    def exists(self, names: Sequence[PageName], now: float) -> list[bool]:
        self.progress(now)
        return self.catalog.are_complete(names)

    def describe(self) -> dict[str, int]:
        """All counters and gauges."""
        gauges = {
            "leases_open": len(self.leases),
            "transfers_open": self.transfers.open_count,
            "pushes_open": len(self.pushes),
            "slots_granted": sum(len(writer.granted) for writer in self.writers),
            "owners": len(self._owners),
            "owner_links": sum(self._owners.values()),
        }
        return self.counts.all() | self.catalog.gauges() | gauges | self.links()

    # ------------------------------------------------------------ transfers

    def open_transfer(
        self, id: str, opener: Writer, names: Sequence[PageName], tokens: int, shelf: Shelf, way: Way, now: float
    ) -> Transfer | None:
        """A hand-off begins. None when its id is known. Raises ``Malformed`` when names and tokens disagree."""
        self._now = now
        check_id(id)
        check_names(names)
        if len(names) != shelf.arena.format.pages_for(tokens) or len(set(names)) != len(names) or not names:
            raise Malformed(f"{len(names)} names are not the pages of a prompt of {tokens} tokens")
        self.progress(now)
        return self.transfers.open(id, opener, names, tokens, way, now)

    def no_more(self, transfer: Transfer, now: float) -> None:
        """The sender of a transfer is through: only pages that others are bringing may still come."""
        self.transfers.offers_no_more(transfer)
        lacking = [name for name in transfer.expected if self.catalog.find(name) is None]
        self.transfers.give_up(transfer, lacking, now)

    def tick(self, now: float) -> None:
        """What time alone brings about."""
        self.progress(now)
        self.leases.expire(now)
        self.transfers.expire(now)
        self.catalog.fail_stalled(now - FILL_STALL_S)
        self.catalog.sweep(now)

    def _pages_complete(self, pages: list[Page]) -> None:
        names = [page.name for page in pages]
        self.page_log.store(names, Medium.MEMORY)
        self.transfers.pages_complete(names, self._now)

    def _page_failed(self, page: Page) -> None:
        self.pushes.page_failed(page, self._now)
        if self.catalog.find(page.name) is None:
            self.transfers.page_gone(page.name, self._now)

    def check_invariants(self) -> None:
        """Raise AssertionError unless all parts agree."""
        self.catalog.check_invariants(self.writers)
        self.transfers.check_invariants()


def _held(page: Page) -> Held:
    return Held(page.ref, page.tokens, page.state is SlotState.COMPLETE, page.shards)


def check_id(id: str) -> None:
    """Raise ``Malformed`` unless ``id``, chosen by somebody else, is short enough to be kept."""
    if not 0 < len(id) <= MAX_ID_LENGTH:
        raise Malformed(f"an id has 1 to {MAX_ID_LENGTH} characters, not {len(id)}")


def check_names(names: Iterable[PageName]) -> None:
    """Raise ``Malformed`` unless each can be one."""
    wrong = set(map(len, names)) - {NAME_BYTES}
    if wrong:
        raise Malformed(f"a page name has {NAME_BYTES} bytes, not {min(wrong)}")


def check_shards(shards: int, kv_heads: int) -> None:
    """Raise ``Malformed`` unless ``shards`` writers can share ``kv_heads`` heads evenly."""
    if shards < 1 or kv_heads % shards:
        raise Malformed(f"{shards} writers cannot share {kv_heads} KV heads evenly")
