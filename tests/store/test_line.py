"""When the peer of a push is given up: never while it takes bytes or answers, and always when a link stands still."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from kvrelay.channel import Channel, bind_tcp
from kvrelay.config import StoreConfig
from kvrelay.errors import Lost
from kvrelay.protocol.peer import Probe, Probed
from kvrelay.store.codecs import Codecs
from kvrelay.store.outbound import Outbound
from kvrelay.store.paths.line import Line
from tests.patience import PATIENCE_S
from tests.store.conftest import KEY
from tests.store.test_late_bytes import Sender

STALL_S = 0.02
QUESTION = Probe(serial=1, size_bytes=1, checksum=0)


def spawn(work: Coroutine[Any, Any, None]) -> None:
    raise AssertionError("nothing is to be started")


class Peer:
    """The far end of some links, on a clock of its own: it reads nothing, and says what it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._listener = bind_tcp("127.0.0.1", 0)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._far: list[socket.socket] = []
        self._near: list[Channel] = []
        self.codecs = Codecs(StoreConfig(), self.clock, spawn)
        self.line = Line(self.link(), STALL_S, self.clock, spawn, self.codecs)

    def clock(self) -> float:
        return self.now

    def link(self) -> Channel:
        near = socket.create_connection(self._listener.getsockname())
        self._far.append(self._listener.accept()[0])
        self._near.append(Channel(near))
        return self._near[-1]

    async def answer_others(self) -> None:
        """Time goes by, and the peer says something again and again."""
        while True:
            self.now += 0.9 * STALL_S
            self.line.heard()
            await asyncio.sleep(STALL_S / 4)

    def close(self) -> None:
        for sock in (self._listener, *self._far):
            sock.close()
        for link in self._near:
            link.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    yield made
    made.close()


@contextlib.asynccontextmanager
async def answering_others(peer: Peer) -> AsyncIterator[None]:
    chatter = asyncio.create_task(peer.answer_others())
    try:
        yield
    finally:
        chatter.cancel()


async def test_a_link_that_moves_nothing_is_given_up_though_the_peer_answers_others(peer: Peer) -> None:
    stuck, payload = peer.link(), memoryview(bytes(100 << 10))
    async with answering_others(peer), asyncio.timeout(PATIENCE_S):
        with pytest.raises(Lost):
            await peer.line.deliver(stuck, 1, QUESTION, [payload], Probed)
    assert stuck.over.done()


async def test_a_peer_that_has_it_all_may_take_long_while_it_answers_others(peer: Peer) -> None:
    async with answering_others(peer):
        asked = asyncio.create_task(peer.line.deliver(peer.link(), 1, QUESTION, [], Probed))
        while peer.now < 20 * STALL_S:
            await asyncio.sleep(STALL_S)
        assert not asked.done()
        peer.line.settle(Probed(serial=1, good=True))
        assert (await asked).good


async def test_a_peer_that_says_nothing_more_is_given_up(peer: Peer) -> None:
    asked = asyncio.create_task(peer.line.deliver(peer.link(), 1, QUESTION, [], Probed))
    await asyncio.sleep(0)
    peer.now = 2 * STALL_S
    with pytest.raises(Lost):
        async with asyncio.timeout(PATIENCE_S):
            await asked


async def test_what_a_slow_link_moved_before_layers_came_in_counts_too(peer: Peer) -> None:
    sender = Sender(1)
    outbound = Outbound("d", KEY, sender.keeper, STALL_S, {}, peer.codecs, peer.clock, spawn)
    sender.announce(0)
    outbound.add(sender.push)
    assert sender.push.next_offer(peer.now) is not None
    peer.now = 0.9 * STALL_S
    await peer.line.link.send(QUESTION)
    while peer.line.link.queued_bytes:
        await asyncio.sleep(0)
    await outbound._wait(peer.line)  # it was woken
    outbound._awake.clear()
    peer.now = 1.1 * STALL_S
    await outbound._wait(peer.line)
    assert peer.line.moved_at == peer.now
    peer.now = 2.2 * STALL_S
    with pytest.raises(Lost):
        await outbound._wait(peer.line)


async def test_what_an_earlier_attempt_brought_is_not_sent_again_when_the_present_one_breaks(peer: Peer) -> None:
    stuck, payload = peer.link(), memoryview(bytes(32 << 20))
    asked = asyncio.create_task(peer.line.deliver(stuck, 1, QUESTION, [payload], Probed))
    while not stuck.queued_bytes:
        await asyncio.sleep(0)
    peer.line.settle(Probed(serial=1, good=True))
    async with asyncio.timeout(PATIENCE_S):
        assert (await asked).good
    assert stuck.over.done()
