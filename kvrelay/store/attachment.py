"""A client's link to its node's store while it lasts: requests matched to answers, one-way messages in order.

It lives on the client's own event loop and must never be touched from another thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Lost, Malformed, Overloaded, answered
from kvrelay.protocol.client import Acquired, Attach, Attached, Described, Existing, Granted
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends
from kvrelay.store.arena import Arena
from kvrelay.store.doorbell import Doorbell
from kvrelay.types import PageFormat

MAX_WAITING = 4096
"""Requests without an answer, and messages not yet sent, beyond which the store counts as gone."""

_BROKE = "the link to the store broke; recompute or ask again after it is back"

Answer = Acquired | Existing | Described | Granted


class Attachment:
    """One attached link. ``run`` ends with an error when the link does."""

    def __init__(self, link: Channel, attached: Attached, arena: Arena, doorbell: Doorbell) -> None:
        self.attached = attached
        self.arena = arena
        self.doorbell = doorbell
        self._link = link
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[type[Message], Future[Message]]] = {}
        self._outbox: deque[Message] = deque()
        self._posted = asyncio.Event()
        self._closed = False

    @classmethod
    async def open(cls, socket_path: Path, key: bytes, owner: str, format: PageFormat) -> Attachment:
        """Connect and map the arena of ``format``. Raises ``Lost``, ``Refused``, ``Malformed``, ``Incompatible``."""
        link = await channel.connect(socket_path, key, sender=owner, purpose="client")
        try:
            async with channel.in_time(socket_path):
                await link.send(Attach(id=0, owner=owner, format=format))
                attached = await channel.expect(link, Attached)
            return cls(link, attached, *_map(link.take_fds(), format))
        except OSError as error:
            link.close()
            raise Lost(f"cannot map the store's arena: {error}") from error
        except BaseException:
            link.close()
            raise

    def __repr__(self) -> str:
        return f"<Attachment to {self.attached.store}, {len(self._waiting)} requests waiting>"

    def post(self, message: Message) -> None:
        """Send ``message`` after those posted before."""
        if len(self._outbox) >= MAX_WAITING:
            self._link.close()  # the store stopped reading: detach rather than lose a message in the middle
            return
        self._outbox.append(message)
        self._posted.set()

    def request(self, build: Callable[[int], Message], kind: type[Message], answer: Future[Message]) -> None:
        """Send the message that ``build`` makes of a fresh id; ``answer`` gets the ``kind`` that comes back."""
        if self._closed:
            _fail(answer, Lost(_BROKE))
            return
        if len(self._waiting) >= MAX_WAITING:
            _fail(answer, Overloaded("the store is slow to answer; ask again later"))
            return
        id = next(self._ids)
        self._waiting[id] = (kind, answer)
        self.post(build(id))

    async def run(self) -> None:
        """Serve the link until it breaks. Raises ``Lost``, ``Malformed``."""
        try:
            await until_one_ends(self._send(), self._receive())
        finally:
            self.close()

    def close(self) -> None:
        """End the link; whoever still waits gets ``Lost``."""
        self._closed = True
        self._link.close()
        for _kind, answer in self._waiting.values():
            _fail(answer, Lost(_BROKE))
        self._waiting.clear()

    async def _send(self) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._outbox:
                await self._link.send(self._outbox.popleft())

    async def _receive(self) -> None:
        while True:
            message = await self._link.recv()
            if not isinstance(message, Answer | Rejected):
                raise Malformed(f"the store sent a {type(message).__name__}")
            self._settle(message)

    def _settle(self, message: Answer | Rejected) -> None:
        kind, answer = self._waiting.pop(message.id, (None, None))
        if kind is None or answer is None or not answer.set_running_or_notify_cancel():
            return  # a late answer to a request that its caller gave up
        if isinstance(message, Rejected):
            answer.set_exception(answered(message.code, message.reason))
        elif isinstance(message, kind):
            answer.set_result(message)
        else:
            answer.set_exception(Malformed(f"expected {kind.__name__}, got {type(message).__name__}"))


def _fail(answer: Future[Message], error: KvrelayError) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def _map(fds: list[int], format: PageFormat) -> tuple[Arena, Doorbell]:
    if len(fds) != 2:
        for fd in fds:
            Doorbell(fd).close()
        raise Malformed(f"the store passed {len(fds)} descriptors instead of 2")
    doorbell = Doorbell(fds[1])
    return Arena.attach(fds[0], format), doorbell
