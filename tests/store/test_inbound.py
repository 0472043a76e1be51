"""One peer's links as their receiver serves them: real sockets within one process, and a clock that is set by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from kvrelay.channel import Channel
from kvrelay.config import StoreConfig
from kvrelay.protocol.feed import TransferEvent
from kvrelay.protocol.message import Message
from kvrelay.protocol.peer import Manifest, PushOpen, PushPages, PushWanted, Segments, Taken, Written
from kvrelay.store.arena import SlotState, checksums
from kvrelay.store.codecs import Codecs
from kvrelay.store.inbound import KEEP_S, Inbound
from kvrelay.store.incoming import Incoming
from kvrelay.store.keeper import FILL_STALL_S, Keeper
from kvrelay.store.landing import Landing
from kvrelay.store.reception import Reception, probing_ground
from kvrelay.types import SlotRef, Transport
from tests.patience import PATIENCE_S
from tests.store.conftest import FORMAT, STRIDE, manifest, page_name, payload

SEGMENT = FORMAT.segment_bytes


def spawn(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("nothing is to be started")


class Guest:
    """A peer of a store, told by hand what to send."""

    def __init__(self) -> None:
        self.now = 0.0
        events: list[TransferEvent] = []
        self.keeper = Keeper("d", StoreConfig(arena_bytes=64 * STRIDE), 1, events.append)
        self._tasks: list[asyncio.Task[None]] = []
        near, self.link = self._pair()
        reception = Reception(self.keeper.room, "", probing_ground(1), None)
        codecs = Codecs(StoreConfig(), self.clock, spawn)
        self.inbound = Inbound(near, self.keeper, reception, codecs, 5.0, self.clock)
        self._tasks.append(asyncio.create_task(self.inbound.serve()))

    def clock(self) -> float:
        return self.now

    def _pair(self) -> tuple[Channel, Channel]:
        near, far = socket.socketpair()
        return Channel(near), Channel(far)

    def data_link(self) -> Channel:
        near, far = self._pair()
        self._tasks.append(asyncio.create_task(self.inbound.serve_data(near)))
        return far

    async def answer(self) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            return await self.link.recv()

    async def offer(self, transfer: str, *numbers: int, direct: bool = False) -> list[SlotRef]:
        names = [page_name(number) for number in numbers]
        opening = PushOpen(transfer=transfer, format=FORMAT, names=names, total_tokens=8 * len(names), direct=direct)
        await self.link.send(opening)
        await self.link.send(PushPages(transfer=transfer, indices=[*range(len(names))]))
        answer = await self.answer()
        assert isinstance(answer, PushWanted)
        assert answer.indices == [*range(len(names))]
        return answer.slots

    def states(self, *numbers: int) -> list[SlotState | None]:
        pages = [self.keeper.catalog.find(page_name(number)) for number in numbers]
        return [None if page is None else page.state for page in pages]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.link.close()


@pytest.fixture
async def guest() -> AsyncIterator[Guest]:
    made = Guest()
    yield made
    await made.close()


def whole(index: int, number: int) -> tuple[Manifest, bytes]:
    """Manifest and bytes of page ``number`` at ``index`` of a push."""
    data = payload(number)
    return manifest(*[(index, layer, [each]) for layer, each in enumerate(checksums(memoryview(data), SEGMENT))]), data


async def test_pages_of_all_pushes_wait_for_their_turn_while_batches_of_any_come_and_no_longer(guest: Guest) -> None:
    await guest.offer("a", 0, 1, 2)
    await guest.offer("b", 10, 11)
    for number in range(3):
        guest.now += FILL_STALL_S - KEEP_S
        what, data = whole(number, number)
        await guest.link.send(Segments(transfer="a", manifest=what, payload_bytes=len(data)), [memoryview(data)])
        assert isinstance(await guest.answer(), Taken)
        guest.keeper.tick(guest.now)
    assert guest.states(0, 1, 2) == [SlotState.COMPLETE] * 3
    assert guest.states(10, 11) == [SlotState.FILLING] * 2
    guest.keeper.tick(guest.now + FILL_STALL_S + KEEP_S)
    assert guest.states(10, 11) == [None] * 2


async def test_a_batch_that_was_written_and_is_being_verified_is_not_confirmed_because_it_comes_again(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    verify = Inbound._verify

    async def later(self: Inbound, incoming: Incoming, landing: Landing, link: Channel | None) -> list[int]:
        if link is None:
            begun.set()
            await may_go_on.wait()
        return await verify(self, incoming, landing, link)

    async def whole_once_taken() -> bool:
        assert isinstance(await guest.answer(), Taken)
        return not guest.keeper.catalog.lacking([page_name(0)])

    monkeypatch.setattr(Inbound, "_verify", later)
    (slot,) = await guest.offer("t", 0, direct=True)
    what, data = whole(0, 0)
    arena = guest.keeper.room.shelf(FORMAT).arena
    arena.data[slot.slot, : len(data)] = memoryview(data)
    await guest.link.send(
        Written(transfer="t", manifest=what, payload_bytes=len(data), serial=7, transport=Transport.SHM)
    )
    await begun.wait()
    taken = asyncio.create_task(whole_once_taken())
    again = Segments(transfer="t", manifest=what, payload_bytes=len(data), serial=7)
    link = guest.data_link()
    await link.send(again, [memoryview(data)])
    for _ in range(100):
        await asyncio.sleep(0)
    may_go_on.set()
    assert await taken
    assert isinstance(await guest.answer(), Taken)
    link.close()
