"""A client's link to its store, kept for ever by a thread of its own: dialled again whenever it breaks.

It must never block its caller, nor leave a question without an answer: while the store is away that is ``Lost``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import TypeVar

from kvrelay.errors import KvrelayError, Lost
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends
from kvrelay.store.attachment import Attachment
from kvrelay.store.refill import Refill
from kvrelay.store.stock import SlotStock
from kvrelay.types import PageFormat

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
_DIED = "the client's thread died; start its process again"
"""``deploy/engine_main.py`` ends an engine in which that happens."""

M = TypeVar("M", bound=Message)


class Tether:
    """The thread, and the attachment that it has at the moment. ``stock`` is kept filled while there is one."""

    def __init__(self, socket_path: Path, key: bytes, owner: str, format: PageFormat, stock: SlotStock) -> None:
        self._socket_path = socket_path
        self._key = key
        self._owner = owner
        self._format = format
        self._stock = stock
        self._refill: Refill | None = None
        self.attachment: Attachment | None = None
        self._is_attached = threading.Event()
        self._retry_s = FIRST_RETRY_S
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=f"store-client {owner}", daemon=True)
        self._stop = asyncio.Event()
        self._is_over = False
        self.problem = "not started"
        """Why there is no link at the moment; empty while attached."""

    def __repr__(self) -> str:
        return "attached" if self.attachment else f"detached ({self.problem})"

    def start(self) -> None:
        """Start the thread and the first dial."""
        self._thread.start()

    def close(self) -> None:
        """End the link and the thread."""
        if self._thread.ident is None:
            self._loop.close()
        elif self._thread.is_alive():
            self._on_loop(self._stop.set)
            self._thread.join()

    def wait_attached(self, timeout_s: float) -> bool:
        """Block until the arena is mapped; whether it is."""
        return self._is_attached.wait(timeout_s)

    def ask(self, build: Callable[[int], Message], kind: type[M]) -> Future[M]:
        """The answer to the message that ``build`` makes of an id; it raises ``Lost`` when there is no store."""
        answer: Future[M] = Future()
        self._on_loop(lambda: self._request(build, kind, answer), lambda: self._refuse(answer))
        if self._is_over:  # the loop may never come to it
            self._refuse(answer)
        return answer

    def post(self, message: Message) -> bool:
        """Send it after those posted before; False while there is no store."""
        attachment = self.attachment
        if attachment:
            self._on_loop(lambda: attachment.post(message))
        return attachment is not None

    def restock(self) -> None:
        """See to it that the stock is filled, if it is low."""
        if self._stock.is_low:
            self._on_loop(self._poke)

    # ------------------------------------------------------------ inside

    def _request(self, build: Callable[[int], Message], kind: type[M], answer: Future[M]) -> None:
        if self.attachment is None:
            self._refuse(answer)
        else:
            self.attachment.request(build, kind, answer)  # type: ignore[arg-type]

    def _refuse(self, answer: Future[M]) -> None:
        with contextlib.suppress(InvalidStateError):  # its caller gave up
            answer.set_exception(Lost(f"no store at {self._socket_path}: {self.problem}"))

    def _on_loop(self, call: Callable[[], None], otherwise: Callable[[], None] = lambda: None) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed
            otherwise()

    def _poke(self) -> None:
        if self._refill is not None:
            self._refill.poke()

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(until_one_ends(self._keep_link(), self._stopped()))
        finally:
            self.attachment = None
            self.problem = "closed" if self._stop.is_set() else _DIED
            self._is_over = True
            self._loop.run_until_complete(asyncio.sleep(0))  # answers what was asked until now
            self._loop.close()

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
        since_s = self._loop.time()
        self.attachment, self.problem = attachment, ""
        self._refill = Refill(attachment, self._stock)
        self._is_attached.set()
        try:
            await until_one_ends(attachment.run(), self._refill.run())
        finally:
            self.attachment = self._refill = None
            self._is_attached.clear()
            self._stock.clear()
            if self._loop.time() - since_s >= LAST_RETRY_S:  # one that drops us at once is not to map arenas for ever
                self._retry_s = FIRST_RETRY_S
