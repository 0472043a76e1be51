"""The sending end of a link to a peer store: all pushes to it take turns. Back-pressure is that of its paths.

It must never outlive a peer that stopped reading: what moves nothing for ``stall_s`` ends the link and its pushes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Lost, Malformed, Overloaded
from kvrelay.protocol.client import LinkReport
from kvrelay.protocol.peer import (
    ArenaFound,
    Met,
    Probed,
    PushClosed,
    PushDamaged,
    PushNews,
    PushOpen,
    PushWanted,
    Taken,
)
from kvrelay.race import until_one_ends
from kvrelay.store.batch import Batch
from kvrelay.store.batch_size import BatchSize
from kvrelay.store.codecs import Codecs
from kvrelay.store.keeper import Keeper
from kvrelay.store.paths.choice import Openers, Paths
from kvrelay.store.paths.line import Line
from kvrelay.store.paths.streams import ControlLink
from kvrelay.store.push import Push
from kvrelay.store.transfers import MAX_REASON_LENGTH
from kvrelay.store.turns import Turns
from kvrelay.types import Codec, PageName

MAX_PUSHES = 1024
WINDOW = 4
"""Batches on their way at a time: enough to keep every stream busy, few enough that a new push is soon served."""


class Outbound:
    """Pushes to one peer. It is over when ``run`` returns; another one is made for the next push."""

    def __init__(
        self,
        address: str,
        key: bytes,
        keeper: Keeper,
        stall_s: float,
        openers: Openers,
        codecs: Codecs,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.address = address
        self.is_over = False
        self._problem = "the peer is being dialled"
        """Why no path to it is known."""
        self._key = key
        self._keeper = keeper
        self._stall_s = stall_s
        self._openers = openers
        self._codecs = codecs
        self._codec = Codec.RAW
        """Of the push that was opened last."""
        self._clock = clock
        self._spawn = spawn
        self._pushes = Turns()
        self._opened: set[str] = set()
        self._awake = asyncio.Event()
        self._paths: Paths | None = None
        self._jobs: asyncio.Queue[tuple[Push, Batch]] = asyncio.Queue()
        self._in_flight = 0
        self._batch_size = BatchSize(WINDOW)

    def __repr__(self) -> str:
        state = "over" if self.is_over else "running"
        return f"<Outbound to {self.address}, {len(self._pushes)} pushes, {state}, {self._paths!r}>"

    def add(self, push: Push) -> None:
        """Take a push over. Raises ``Overloaded``."""
        if len(self._pushes) >= MAX_PUSHES:
            raise Overloaded(f"{MAX_PUSHES} pushes to {self.address} are open already; wait for some to end")
        self._pushes.add(push)
        self.wake()

    def wake(self) -> None:
        """Something may be ready to be sent."""
        self._awake.set()

    @property
    def reports(self) -> list[LinkReport]:
        """What is known of the paths to the peer."""
        if self._paths is not None and not self.is_over:
            return self._paths.reports(self.address)
        return [LinkReport(peer=self.address, transport=each, problem=self._problem) for each in self._openers]

    async def run(self) -> None:
        """Dial and serve the pushes until the link breaks; then fail those that are left."""
        problem, unreachable = "its store is stopping", False
        try:
            link = await channel.connect(self.address, self._key, sender=self._keeper.name, purpose="peer")
            await self._serve(Line(link, self._stall_s, self._clock, self._spawn, self._codecs))
        except KvrelayError as error:
            problem, unreachable = str(error), True
        finally:
            self.is_over, self._problem = True, problem
            for push in self._pushes:
                self._end(push, problem, unreachable=unreachable)

    async def _serve(self, line: Line) -> None:
        paths = self._paths = Paths(line, ControlLink(line), self._openers, self._clock)
        try:
            carriers = [self._carry(paths) for _ in range(WINDOW)]
            await until_one_ends(self._send(line), self._listen(line), paths.run(), *carriers)
        finally:
            paths.close()

    # ------------------------------------------------------------ pages

    async def _send(self, line: Line) -> None:
        while True:
            self._awake.clear()
            while await self._turn(line):
                await asyncio.sleep(0)  # a peer that reads as fast as we send must not keep the loop from others
            await self._wait(line)

    async def _turn(self, line: Line) -> bool:
        """One batch of each push while places are free; whether there may be more."""
        more = False
        for push in self._pushes:
            more |= await self._advance(line, push)
        return more

    async def _advance(self, line: Line, push: Push) -> bool:
        if push.transfer.id not in self._opened:
            if push.problem:  # the peer has not heard of it
                self._end(push, push.problem)
                return False
            self._opened.add(push.transfer.id)
            await line.link.send(self._opening(push), stall_s=self._stall_s)
        batch = None
        if not push.problem:
            while (offer := push.next_offer(self._clock())) is not None:
                await line.link.send(offer, stall_s=self._stall_s)
            batch = self._next_batch(push, line.serial()) if self._in_flight < WINDOW else None
        if batch is not None:
            self._in_flight += 1
            self._pushes.served(push)
            push.passage.leave(self._clock())
            self._jobs.put_nowait((push, batch))
        elif not push.passage.in_flight and (push.problem or push.is_done):
            await self._close(line.link, push)
        return batch is not None

    def _next_batch(self, push: Push, serial: int) -> Batch | None:
        best = None if self._paths is None else self._paths.best
        speed = None if best is None else best.score.bytes_per_s
        return push.next_batch(serial, self._batch_size.bytes(push.most_batch_bytes, speed))

    def _opening(self, push: Push) -> PushOpen:
        paths = self._paths
        direct = paths is not None and paths.wants_slots
        speed = None if paths is None else paths.stream_bytes_per_s
        self._codec = self._codecs.propose(push.format, push.size_bytes, speed, self._codec)
        return push.opening(direct=direct, codec=self._codec)

    async def _carry(self, paths: Paths) -> None:
        """One batch at a time, of whatever push it is."""
        while True:
            push, batch = await self._jobs.get()
            retries, began = 0, self._clock()
            try:
                retries = await paths.carry(batch)
            finally:
                self._in_flight -= 1
                push.passage.land(retries, self._clock())
            self._batch_size.took(self._clock() - began, self._pushes.places)
            push.settle(batch)
            self._keeper.transfers.touch(push.transfer.id, self._clock())
            self._keeper.counts.add("bytes_pushed", batch.message.payload_bytes)
            self.wake()

    async def _close(self, link: Channel, push: Push) -> None:
        closing = PushClosed(transfer=push.transfer.id, complete=not push.problem, reason=push.problem)
        await link.send(closing, stall_s=self._stall_s)
        self._end(push, push.problem)

    # ------------------------------------------------------------ answers

    async def _wait(self, line: Line) -> None:
        """Until something can be sent. Raises ``Lost`` when the peer owes an answer and nothing moves for too long."""
        try:
            async with asyncio.timeout(self._patience_s(line)):
                await self._awake.wait()
        except TimeoutError as error:
            if not line.has_moved():
                raise Lost(f"{self.address} did not answer an offer within {self._stall_s:g} s") from error

    def _patience_s(self, line: Line) -> float | None:
        owed = [push.waits_since for push in self._pushes if push.waits_since is not None]
        return max(min(owed), line.moved_at) + self._stall_s - self._clock() if owed else None

    async def _listen(self, line: Line) -> None:
        while True:
            message = await line.link.recv()
            line.heard()
            match message:
                case Taken() | Met() | ArenaFound() | Probed():
                    line.settle(message)
                case PushDamaged():
                    await self._inspect(message.names)
                case PushWanted() | PushNews() | PushClosed():
                    self._answered(message)
                case _:
                    raise Malformed(f"a peer answered with {type(message).__name__}")

    def _answered(self, message: PushWanted | PushNews | PushClosed) -> None:
        push = self._pushes.get(message.transfer)
        if push is None:
            return  # it ended meanwhile
        match message:
            case PushWanted():
                push.answer(message, self._clock())
            case PushNews():
                push.heard(message, self._clock())
                self._keeper.transfers.touch(message.transfer, self._clock())
            case PushClosed():
                push.problem = push.problem or f"the peer ended it: {message.reason[:MAX_REASON_LENGTH]}"
        self.wake()

    async def _inspect(self, names: list[PageName]) -> None:
        """The peer got bytes that do not match: were they damaged here, or on the way?"""
        for name in names:
            page = self._keeper.catalog.find(name)
            if page is not None:
                self._keeper.inspect(page, self._clock())
                await asyncio.sleep(0)  # it reads the whole page, and a peer may name many

    def _end(self, push: Push, problem: str, *, unreachable: bool = False) -> None:
        self._pushes.remove(push)
        self._opened.discard(push.transfer.id)
        self._keeper.pushes.remove(push)
        now = self._clock()
        if problem:
            self._keeper.counts.add("pushes_failed")
            self._keeper.transfers.fail(push.transfer, problem, now, unreachable=unreachable)
        else:
            self._keeper.transfers.finish(push.transfer, push.passage, now)
