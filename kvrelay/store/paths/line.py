"""The link of pushes to one peer, as its paths use it: questions, batches, and the answers that the peer owes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kvrelay.channel import Channel
from kvrelay.errors import Lost, Malformed
from kvrelay.protocol.message import Message
from kvrelay.protocol.peer import ArenaFound, Met, Probed, Taken, Written
from kvrelay.store.codecs import Codecs

Answer = Taken | Met | ArenaFound | Probed

A = TypeVar("A", bound=Answer)


class Line:
    """Serials and the futures of their answers. What no answer comes for within ``stall_s`` is ``Lost``."""

    def __init__(
        self,
        link: Channel,
        stall_s: float,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        codecs: Codecs,
    ) -> None:
        self.link = link
        self.stall_s = stall_s
        self.spawn = spawn
        self.codecs = codecs
        self._clock = clock
        self._serials = itertools.count(1)
        self._owed: dict[int, asyncio.Future[Answer]] = {}
        self.moved_at = clock()
        """When the peer said something last, or was seen to take bytes of ``link``."""
        self._delivered = link.delivered_bytes
        """As of then."""

    def __repr__(self) -> str:
        return f"<Line with {self.link.peer}, {len(self._owed)} answers owed>"

    def serial(self) -> int:
        """A number that no other batch or question of this link has."""
        return next(self._serials)

    def settle(self, answer: Answer) -> None:
        """An answer came. One that nobody waits for any more is dropped."""
        owed = self._owed.pop(answer.serial, None)
        if owed is not None and not owed.done():
            owed.set_result(answer)

    async def ask(self, build: Callable[[int], Message], kind: type[A]) -> A:
        """Ask over the link itself. Raises ``Lost``, ``Malformed``."""
        serial = self.serial()
        return await self._exchange(self.link, serial, build(serial), (), kind)

    async def deliver(
        self, link: Channel, serial: int, message: Message, payload: Iterable[memoryview], kind: type[A]
    ) -> A:
        """Send ``message`` over ``link``; the answer to it comes over our own. Raises ``Lost``, and closes ``link``."""
        try:
            return await self._exchange(link, serial, message, payload, kind)
        except Lost:
            link.close()  # what it was in the middle of must not go on behind its successor's back
            raise

    async def confirmed(self, written: Written) -> None:
        """Tell the peer that a batch is where it belongs, and wait until it has taken it. Raises ``Lost``."""
        await self._exchange(self.link, written.serial, written, (), Taken)

    async def _exchange(
        self, link: Channel, serial: int, message: Message, payload: Iterable[memoryview], kind: type[A]
    ) -> A:
        owed: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._owed[serial] = owed
        try:
            await link.send(message, payload, stall_s=self.stall_s)
            await self._wait(link, owed)
        except Lost:
            if not owed.done():  # else the peer has it from an earlier attempt
                raise
        finally:
            self._owed.pop(serial, None)
        answer = owed.result()
        if not isinstance(answer, kind):
            raise Malformed(f"{self.link.peer} answered with {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _wait(self, link: Channel, owed: asyncio.Future[Answer]) -> None:
        """Until the answer is here. Raises ``Lost`` once the peer says and takes nothing for too long."""
        since = self._clock()
        while not owed.done():
            delivered = link.delivered_bytes
            ends: list[asyncio.Future[Any]] = [owed, link.over]
            await asyncio.wait(ends, timeout=self._patience_s(link, since), return_when=asyncio.FIRST_COMPLETED)
            if owed.done():
                break
            if link.over.done():
                raise Lost(f"the link to {self.link.peer} broke before it had taken everything")
            if link.delivered_bytes > delivered:
                since = self._clock()
            elif self._patience_s(link, since) <= 0:
                raise Lost(f"{self.link.peer} did not answer within {self.stall_s:g} s")

    def _patience_s(self, link: Channel, since: float) -> float:
        """A peer that has it all may take long, as long as it answers others; a link that moves nothing is broken."""
        moved_at = since if link.queued_bytes else max(since, self.moved_at)
        return max(0.0, moved_at + self.stall_s - self._clock())

    def heard(self) -> None:
        """The peer said something: it lives, and what it owes may still come."""
        self.moved_at, self._delivered = self._clock(), self.link.delivered_bytes

    def has_moved(self) -> bool:
        """Whether the peer took bytes of ``link`` since ``moved_at``, which is now if it did."""
        moved = self.link.delivered_bytes > self._delivered
        if moved:
            self.heard()
        return moved
