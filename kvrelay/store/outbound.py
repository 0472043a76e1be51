"""The sending end of a link to a peer store: all pushes to it take turns. Back-pressure is TCP's own.

It must never outlive a peer that stopped reading: what moves nothing for ``stall_s`` ends the link and its pushes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Lost, Malformed, Overloaded
from kvrelay.protocol import PushClosed, PushDamaged, PushWanted
from kvrelay.race import until_one_ends
from kvrelay.store.keeper import Keeper
from kvrelay.store.push import Push
from kvrelay.types import PageName

MAX_PUSHES = 1024


class Outbound:
    """Pushes to one peer, over one link. It is over when ``run`` returns; another one is made for the next push."""

    def __init__(self, address: str, key: bytes, keeper: Keeper, stall_s: float, clock: Callable[[], float]) -> None:
        self.address = address
        self.is_over = False
        self._key = key
        self._keeper = keeper
        self._stall_s = stall_s
        self._clock = clock
        self._pushes: dict[str, Push] = {}
        self._opened: set[str] = set()
        self._awake = asyncio.Event()
        self._moved_at = 0.0
        """When payload or an answer moved last: an offer waits behind the bytes that were sent before it."""

    def __repr__(self) -> str:
        state = "over" if self.is_over else "running"
        return f"<Outbound to {self.address}, {len(self._pushes)} pushes, {state}>"

    def add(self, push: Push) -> None:
        """Take a push over. Raises ``Overloaded``."""
        if len(self._pushes) >= MAX_PUSHES:
            raise Overloaded(f"{MAX_PUSHES} pushes to {self.address} are open already; wait for some to end")
        self._pushes[push.transfer.id] = push
        self.wake()

    def wake(self) -> None:
        """Something may be ready to be sent."""
        self._awake.set()

    async def run(self) -> None:
        """Dial and serve the pushes until the link breaks; then fail those that are left."""
        problem = "its store is stopping"
        try:
            link = await channel.connect(self.address, self._key, sender=self._keeper.name, purpose="peer")
            try:
                await until_one_ends(self._send(link), self._listen(link))
            finally:
                link.close()
        except KvrelayError as error:
            problem = str(error)
        finally:
            self.is_over = True
            for push in list(self._pushes.values()):
                self._end(push, problem)

    async def _send(self, link: Channel) -> None:
        while True:
            self._awake.clear()
            while await self._turn(link):
                await asyncio.sleep(0)  # a peer that reads as fast as we send must not keep the loop from others
            await self._wait(link)

    async def _turn(self, link: Channel) -> bool:
        """One batch of each push; whether there may be more."""
        more = False
        for push in list(self._pushes.values()):
            more |= await self._advance(link, push)
        return more

    async def _advance(self, link: Channel, push: Push) -> bool:
        if push.transfer.id not in self._opened:
            self._opened.add(push.transfer.id)
            push.queued_bytes = lambda: link.queued_bytes
            await link.send(push.opening, stall_s=self._stall_s)
        if push.problem:
            await self._close(link, push)
            return False
        while (offer := push.next_offer(self._clock())) is not None:
            await link.send(offer, stall_s=self._stall_s)
        batch = push.next_batch()
        if batch is not None:
            await link.send(batch.message, batch.views, stall_s=self._stall_s)
            push.settle(batch)
            self._moved_at = self._clock()
            self._keeper.counts.add("bytes_pushed", batch.message.payload_bytes)
        if push.is_done:
            await self._close(link, push)
        return batch is not None

    async def _close(self, link: Channel, push: Push) -> None:
        closing = PushClosed(transfer=push.transfer.id, complete=not push.problem, reason=push.problem)
        await link.send(closing, stall_s=self._stall_s)
        self._end(push, push.problem)

    async def _wait(self, link: Channel) -> None:
        """Until something can be sent. Raises ``Lost`` when the peer owes an answer and nothing moves for too long."""
        queued = link.queued_bytes
        try:
            async with asyncio.timeout(self._patience_s()):
                await self._awake.wait()
        except TimeoutError as error:
            if link.queued_bytes >= queued:
                raise Lost(f"{self.address} did not answer an offer within {self._stall_s:g} s") from error
            self._moved_at = self._clock()

    def _patience_s(self) -> float | None:
        owed = [push.waits_since for push in self._pushes.values() if push.waits_since is not None]
        return max(min(owed), self._moved_at) + self._stall_s - self._clock() if owed else None

    async def _listen(self, link: Channel) -> None:
        while True:
            message = await link.recv()
            self._moved_at = self._clock()
            push = self._pushes.get(getattr(message, "transfer", ""))
            match message:
                case PushWanted() if push is not None:
                    push.answer(message.indices, self._clock())
                case PushClosed() if push is not None:
                    push.problem = push.problem or f"the peer ended it: {message.reason}"
                case PushDamaged():
                    self._inspect(message.names)
                case PushWanted() | PushClosed():
                    pass  # about a push that ended meanwhile
                case _:
                    raise Malformed(f"a peer answered with {type(message).__name__}")
            self.wake()

    def _inspect(self, names: list[PageName]) -> None:
        """The peer got bytes that do not match: were they damaged here, or on the way?"""
        for name in names:
            page = self._keeper.catalog.find(name)
            if page is not None:
                self._keeper.inspect(page, self._clock())

    def _end(self, push: Push, problem: str) -> None:
        del self._pushes[push.transfer.id]
        self._opened.discard(push.transfer.id)
        self._keeper.pushes.remove(push)
        if problem:
            self._keeper.counts.add("pushes_failed")
            self._keeper.transfers.fail(push.transfer, problem, self._clock())
        else:
            self._keeper.transfers.finish(push.transfer, push.late_bytes, self._clock())
