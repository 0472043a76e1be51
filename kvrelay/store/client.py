"""What a worker or a script holds of its node's store. It never blocks its caller, except the helpers for scripts.

A background thread keeps the link, for ever: while the store is away everything is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TypeVar

from kvrelay.errors import KvrelayError, Lost, Overloaded
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
from kvrelay.race import until_one_ends
from kvrelay.store.arena import Arena
from kvrelay.store.attachment import Attachment
from kvrelay.store.bulk import NamedPayload, put_pages, read_pages, wait
from kvrelay.store.copying import read_page, read_page_into
from kvrelay.store.inquiry import Inquiry
from kvrelay.store.refill import Refill
from kvrelay.store.stock import SlotStock
from kvrelay.types import PageFormat, PageName, SlotRef, Stage

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0

M = TypeVar("M", bound=Message)


class StoreClient:
    """Link of one ``owner`` (``worker/incarnation``) to its store, for pages of one format."""

    def __init__(self, socket_path: Path, key: bytes, *, owner: str, format: PageFormat, grant_slots: int = 0) -> None:
        self._socket_path = socket_path
        self._key = key
        self._owner = owner
        self._format = format
        self._stock = SlotStock(grant_slots)
        self._refill: Refill | None = None
        self._attachment: Attachment | None = None
        self._is_attached = threading.Event()
        self._retry_s = FIRST_RETRY_S
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=f"store-client {owner}", daemon=True)
        self._stop = asyncio.Event()
        self._is_over = False
        self._inquiry = Inquiry(socket_path, key, sender=owner)
        self._posted: Message | None = None
        """The last one-way message."""
        self._taken: Message | None = None
        """The last one that the store is known to have taken."""
        self.problem = "not started"
        """Why there is no link at the moment; empty while attached."""

    def __repr__(self) -> str:
        state = "attached" if self._attachment else f"detached ({self.problem})"
        return f"<StoreClient {self._owner} at {self._socket_path}, {state}, {self._stock!r}>"

    def start(self) -> None:
        """Start the background thread and the first dial."""
        self._thread.start()

    def close(self) -> None:
        """End the link and the thread."""
        self._inquiry.close()
        if self._thread.ident is None:
            self._loop.close()
        elif self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def wait_attached(self, timeout_s: float) -> bool:
        """Block until the arena is mapped; whether it is."""
        return self._is_attached.wait(timeout_s)

    # ------------------------------------------------------------ never blocking

    @property
    def arena(self) -> Arena | None:
        """The mapped arena; None while detached. Every attachment makes a new one; keep the object while you use it."""
        attachment = self._attachment
        return attachment.arena if attachment else None

    def take_slots(self, count: int) -> list[SlotRef]:
        """Up to ``count`` empty slots to write into, each to be announced once; fewer when out."""
        slots = self._stock.take(count)
        self._restock()
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
        attachment = self._attachment
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
        asked = list(names), list(transfers)
        return self._ask(
            lambda id: Acquire(id=id, lease=lease, names=asked[0], ttl_s=ttl_s, transfers=asked[1]), Acquired
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
            self._restock()  # not before: it takes the interpreter, and the memory's bandwidth, from the copies

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
            wait(self._ask(lambda id: Exists(id=id, names=[]), Existing))
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
            granted = self._ask(lambda id: Allocate(id=id, count=lacking), Granted)
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

    # ------------------------------------------------------------ the background thread

    def _ask(self, build: Callable[[int], Message], kind: type[M]) -> Future[M]:
        answer: Future[M] = Future()
        self._on_loop(lambda: self._request(build, kind, answer), lambda: self._refuse(answer))
        if self._is_over:  # the loop may never come to it
            self._refuse(answer)
        return answer

    def _request(self, build: Callable[[int], Message], kind: type[M], answer: Future[M]) -> None:
        if self._attachment is None:
            self._refuse(answer)
        else:
            self._attachment.request(build, kind, answer)  # type: ignore[arg-type]

    def _refuse(self, answer: Future[M]) -> None:
        with contextlib.suppress(InvalidStateError):  # its caller gave up
            answer.set_exception(Lost(f"no store at {self._socket_path}: {self.problem}"))

    def _post(self, message: Message) -> None:
        attachment = self._attachment
        if attachment:
            self._on_loop(lambda: attachment.post(message))
            self._posted = message  # not before: who sees it here may rely on its being on its way

    def _on_loop(self, call: Callable[[], None], otherwise: Callable[[], None] = lambda: None) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed
            otherwise()

    def _restock(self) -> None:
        if self._stock.is_low:
            self._on_loop(self._poke)

    def _poke(self) -> None:
        if self._refill is not None:
            self._refill.poke()

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._attachment = None
            self.problem = self.problem or "its thread died"
            self._is_over = True
            self._loop.run_until_complete(asyncio.sleep(0))  # answers what was asked until now
            self._loop.close()

    async def _run(self) -> None:
        try:
            await until_one_ends(self._keep_link(), self._stopped())
        finally:
            self.problem = "closed"

    async def _stopped(self) -> None:
        await self._stop.wait()

    async def _keep_link(self) -> None:
        while True:
            try:
                # Not kept in a local: it would hold the arena of a dead store until the next one is there.
                await self._serve(await Attachment.open(self._socket_path, self._key, self._owner, self._format))
            except KvrelayError as error:
                self.problem = str(error)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)

    async def _serve(self, attachment: Attachment) -> None:
        self._attachment, self.problem, self._retry_s = attachment, "", FIRST_RETRY_S
        self._refill = Refill(attachment, self._stock)
        self._is_attached.set()
        try:
            await until_one_ends(attachment.run(), self._refill.run())
        finally:
            self._attachment = self._refill = None
            self._is_attached.clear()
            self._stock.clear()
