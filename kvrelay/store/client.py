"""What a worker or a script holds of its node's store. It never blocks its caller, except the helpers for scripts.

A background thread keeps the link, for ever: while the store is away everything is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from kvrelay.errors import Lost, Overloaded
from kvrelay.protocol.client import (
    Acquire,
    Acquired,
    Allocate,
    Announce,
    Existing,
    Exists,
    Granted,
    Milestone,
    NewPage,
    OpenTransfer,
    Release,
    Report,
    Suspect,
)
from kvrelay.protocol.message import Message
from kvrelay.store.arena import Arena
from kvrelay.store.bulk import NamedPayload, put_pages, read_pages, wait
from kvrelay.store.copying import read_page, read_page_into
from kvrelay.store.inquiry import Inquiry
from kvrelay.store.stock import SlotStock
from kvrelay.store.tether import Tether
from kvrelay.types import PageFormat, PageName, SlotRef, Stage


class StoreClient:
    """Link of one ``owner`` (``worker/incarnation``) to its store, for pages of one format."""

    def __init__(self, socket_path: Path, key: bytes, *, owner: str, format: PageFormat, grant_slots: int = 0) -> None:
        self._socket_path = socket_path
        self._key = key
        self._owner = owner
        self._format = format
        self._stock = SlotStock(grant_slots)
        self._tether = Tether(socket_path, key, owner, format, self._stock)
        self._inquiry = Inquiry(socket_path, key, sender=owner)
        self._posted: Message | None = None
        """The last one-way message."""
        self._taken: Message | None = None
        """The last one that the store is known to have taken."""

    def __repr__(self) -> str:
        return f"<StoreClient {self._owner} at {self._socket_path}, {self._tether!r}, {self._stock!r}>"

    @property
    def problem(self) -> str:
        """Why there is no link at the moment; empty while attached."""
        return self._tether.problem

    def start(self) -> None:
        """Start the background thread and the first dial."""
        self._tether.start()

    def close(self) -> None:
        """End the link and the thread."""
        self._inquiry.close()
        self._tether.close()

    def wait_attached(self, timeout_s: float) -> bool:
        """Block until the arena is mapped; whether it is."""
        return self._tether.wait_attached(timeout_s)

    # ------------------------------------------------------------ never blocking

    @property
    def arena(self) -> Arena | None:
        """The mapped arena; None while detached. Every attachment makes a new one; keep the object while you use it."""
        attachment = self._tether.attachment
        return attachment.arena if attachment else None

    def take_slots(self, count: int) -> list[SlotRef]:
        """Up to ``count`` empty slots to write into, each to be announced once; fewer when out."""
        slots = self._stock.take(count)
        self._tether.restock()
        return slots

    def give_back(self, slots: Sequence[SlotRef]) -> None:
        """Return taken slots that were never announced; those of a store that is gone are dropped."""
        arena = self.arena
        if arena is not None:
            self._stock.add([slot for slot in slots if arena.is_current(slot)])

    def announce(self, pages: Sequence[NewPage], transfer: str | None = None) -> None:
        """Tell the store which pages the taken slots become, in the prompt's order; then fill them and ``ring``."""
        self._post(Announce(pages=list(pages), transfer=transfer))

    def ring(self) -> None:
        """Wake the store: layers were published."""
        attachment = self._tether.attachment
        if attachment:
            attachment.doorbell.ring()

    def open_transfer(
        self, transfer: str, names: Sequence[PageName], total_tokens: int, push_to: str | None, *, final: bool = False
    ) -> None:
        """P starts a request whose pages go to the store at ``push_to`` (None: they stay here).

        ``final``: all of them were announced before; those that are not here any more do not travel.
        """
        self._post(
            OpenTransfer(transfer=transfer, names=list(names), total_tokens=total_tokens, push_to=push_to, final=final)
        )

    def milestone(self, transfer: str, stage: Stage, *, reason: str = "", tokens: int = 0) -> None:
        """Pass a milestone of a transfer to the routers."""
        self._post(Milestone(transfer=transfer, stage=stage, reason=reason, tokens=tokens))

    def release(self, lease: str) -> None:
        """Unpin what ``lease`` holds."""
        self._post(Release(lease=lease))

    def suspect(self, slots: Sequence[SlotRef]) -> None:
        """Tell the store that these slots hold wrong bytes, or will never be filled: it looks and forgets them."""
        self._post(Suspect(slots=list(slots)))

    def report(self, counts: dict[str, int]) -> None:
        """Add to counters that ``describe`` shows."""
        self._post(Report(counts=counts))

    def acquire(
        self, lease: str, names: Sequence[PageName], ttl_s: float, transfers: Sequence[str] = ()
    ) -> Future[Acquired]:
        """Pin what is here or arriving among ``names``; the future raises ``Lost`` when there is no store."""
        wanted, bringing = list(names), list(transfers)  # as they are now: the message is made later
        return self._tether.ask(
            lambda id: Acquire(id=id, lease=lease, names=wanted, ttl_s=ttl_s, transfers=bringing), Acquired
        )

    # ------------------------------------------------------------ blocking, for scripts

    def exists(self, names: Sequence[PageName]) -> list[bool]:
        """Which pages are complete in the store. Raises ``Lost``."""
        return self._informed().exists(names)

    def describe(self) -> dict[str, int]:
        """The store's counters. Raises ``Lost``."""
        return self._informed().describe()

    def put(self, name: PageName, payload: bytes | memoryview, tokens: int) -> None:
        """Store one page: per layer and KV head K, then V of ``tokens`` tokens. Everybody finds it once this returns.

        Raises ``Lost``, ``Overloaded``, ``ValueError``.
        """
        self.put_many([(name, payload, tokens)])

    def put_many(self, pages: Sequence[NamedPayload]) -> None:
        """``put`` for the pages of one prompt, in its order: later ones are evicted before earlier ones."""
        arena = self._mapped()
        try:
            put_pages(self, arena, self._slots(len(pages)), pages)
            self._informed()
        finally:
            self._tether.restock()  # not before: it takes the interpreter, and the memory's bandwidth, from the copies

    def get(self, name: PageName) -> bytes | None:
        """A verified copy of a page, None when it is not here or not whole. Raises ``Lost``."""
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[PageName]) -> list[bytes | None]:
        """``get`` for many pages, with one question to the store."""
        arena = self._mapped()
        return read_pages(self, names, lambda _, page: read_page(arena, page.slot, page.tokens, page.shards))

    def get_into(self, names: Sequence[PageName], targets: Sequence[memoryview]) -> list[bool]:
        """``get_many`` into the caller's memory; False, and what is in the target means nothing, for a miss."""
        arena = self._mapped()
        return [
            bool(read)
            for read in read_pages(
                self,
                names,
                lambda at, page: read_page_into(arena, page.slot, page.tokens, targets[at], page.shards) or None,
            )
        ]

    def _informed(self) -> Inquiry:
        """Whom to ask, once the store has taken all that was posted: questions have a link of their own.

        On the other one messages are taken in order: once the last of them is answered, those before it were taken.
        """
        self._mapped()
        posted = self._posted
        if posted is not self._taken:
            wait(self._tether.ask(lambda id: Exists(id=id, names=[]), Existing))
            self._taken = posted
        return self._inquiry

    def _mapped(self) -> Arena:
        arena = self.arena
        if arena is None:
            raise Lost(f"no store at {self._socket_path}: {self.problem}")
        return arena

    def _slots(self, count: int) -> list[SlotRef]:
        slots = self._stock.take(count)
        lacking = count - len(slots)
        if lacking:
            granted = self._tether.ask(lambda id: Allocate(id=id, count=lacking), Granted)
            try:
                slots += wait(granted).slots
            except BaseException:
                self.give_back(slots)
                granted.add_done_callback(self._take_late)
                raise
        if len(slots) < count:
            self.give_back(slots)
            raise Overloaded("the store is full of pinned pages; release some or enlarge store.arena_bytes")
        return slots

    def _take_late(self, granted: Future[Granted]) -> None:
        """Slots may come though nobody waits for them any more."""
        if not granted.cancelled() and granted.exception() is None:
            self.give_back(granted.result().slots)

    def _post(self, message: Message) -> None:
        if self._tether.post(message):
            self._posted = message  # not before: who sees it here may rely on its being on its way
