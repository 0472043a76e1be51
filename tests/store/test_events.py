"""What routers hear of a store: who it is, that it lives, and the milestones of every transfer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.protocol.client import LinkReport, NewPage
from kvrelay.protocol.feed import (
    Heartbeat,
    Neighbours,
    PageEvents,
    PageSnapshot,
    PagesWanted,
    RegisterStore,
    TransferEvent,
)
from kvrelay.protocol.message import Message
from kvrelay.store.client import StoreClient
from kvrelay.types import PageName, Stage, Transport
from tests.patience import until_on_thread
from tests.store.conftest import FORMAT, KEY, StoreProcess, page_name, payload
from tests.store.test_client import take

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]


class Ear:
    """A router that only listens."""

    def __init__(self, address: str, tell: Message | None) -> None:
        self.address = address
        self._tell = tell
        self.heard: list[Message] = []
        self.channels: list[Channel] = []

    async def serve(self, link: Channel) -> None:
        if self._tell is not None:
            await link.send(self._tell)
        self.channels.append(link)
        while True:
            self.heard.append(await link.recv())

    def channel(self, sender: str) -> Channel:
        """The last link of a store: which of two dials first is chance."""
        return [link for link in self.channels if link.peer == sender][-1]

    def links(self) -> list[LinkReport]:
        """As the last heartbeat said."""
        return next((beat.links for beat in reversed(self.heard) if isinstance(beat, Heartbeat)), [])

    def stages(self, transfer: str) -> list[tuple[str, Stage]]:
        events = [message for message in self.heard if isinstance(message, TransferEvent)]
        return [(event.store, event.stage) for event in events if event.transfer == transfer]

    def pages(self) -> set[PageName]:
        """What the store said it has."""
        known: set[PageName] = set()
        for message in self.heard:
            if isinstance(message, PageSnapshot):
                known.update(message.names)
            elif isinstance(message, PageEvents):
                known.update(*(change.stored for change in message.changes))
        return known

    def event(self, transfer: str, stage: Stage) -> TransferEvent:
        events = [message for message in self.heard if isinstance(message, TransferEvent)]
        return next(event for event in events if (event.transfer, event.stage) == (transfer, stage))


@contextlib.asynccontextmanager
async def listening(tell: Message | None = None) -> AsyncIterator[Ear]:
    sock = bind_tcp("127.0.0.1", 0)
    host, port = sock.getsockname()
    ear = Ear(f"{host}:{port}", tell)
    listener = Listener(sock, KEY, receiver="router", purposes={"feed"}, serve=ear.serve)
    task = asyncio.create_task(listener.run())
    try:
        yield ear
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_store_registers_and_shows_its_counters(start_store: Start) -> None:
    async with listening() as ear:
        store = await asyncio.to_thread(lambda: start_store(routers=(ear.address,)))
        await until_on_thread(lambda: any(isinstance(message, Heartbeat) for message in ear.heard))
        first, second = ear.heard[:2]
        assert isinstance(first, RegisterStore)
        assert (first.store.name, first.store.address) == ("store-0", store.address)
        assert isinstance(second, Heartbeat)
        assert second.healthy
        assert second.counts["pages_used"] == 0


async def test_the_milestones_of_a_pushed_transfer_come_from_the_store_where_they_happen(
    start_store: Start, connect: Connect
) -> None:
    async with listening() as ear:
        p, d = [await asyncio.to_thread(start_store, name, 64, "", (ear.address,)) for name in ("store-p", "store-d")]
        writer, reader = connect(p, "p/1"), connect(d, "d/1")
        names = [page_name(number) for number in range(3)]
        began = time.monotonic()
        writer.open_transfer("t", names, 24, d.address)
        writer.milestone("t", Stage.STARTED, tokens=24)
        for number in range(3):
            await asyncio.to_thread(writer.put, page_name(number), payload(number), 8)
        writer.milestone("t", Stage.LAST_CHUNK, tokens=24)
        await until_on_thread(lambda: ("store-d", Stage.ARRIVED) in ear.stages("t"))
        reader.milestone("t", Stage.LOADED, tokens=24)
        await until_on_thread(lambda: ("store-d", Stage.LOADED) in ear.stages("t"))
        told = {("store-p", stage) for stage in (Stage.LAST_CHUNK, Stage.SENT)}
        await until_on_thread(lambda: told <= set(ear.stages("t")))
        took_s = time.monotonic() - began
        at_p = [stage for store, stage in ear.stages("t") if store == "store-p"]
        assert (at_p[0], set(at_p[1:])) == (Stage.STARTED, {Stage.LAST_CHUNK, Stage.SENT})
        assert [stage for store, stage in ear.stages("t") if store == "store-d"] == [Stage.ARRIVED, Stage.LOADED]
        arrived = ear.event("t", Stage.ARRIVED)
        assert (arrived.tokens, arrived.bytes, arrived.pages) == (24, 3 * len(payload(0)), 3)
        assert arrived.transport is Transport.TCP
        assert 1 <= arrived.runs <= 3 * FORMAT.layers
        assert 0 < arrived.seconds < took_s
        sent = ear.event("t", Stage.SENT)
        assert 0 < sent.late_bytes <= arrived.bytes
        assert 0 < sent.moving_s < took_s
        assert sent.retries == 0


async def test_whole_pages_are_one_run_each_and_what_is_there_before_the_push_is_late(
    start_store: Start, connect: Connect
) -> None:
    async with listening() as ear:
        p, d = [await asyncio.to_thread(start_store, name, 64, "", (ear.address,)) for name in ("store-p", "store-d")]
        writer = connect(p, "p/1")
        for number in range(3):
            await asyncio.to_thread(writer.put, page_name(number), payload(number), 8)
        writer.open_transfer("t", [page_name(number) for number in range(3)], 24, d.address)
        await until_on_thread(lambda: {stage for _, stage in ear.stages("t")} == {Stage.SENT, Stage.ARRIVED})
        arrived = ear.event("t", Stage.ARRIVED)
        assert (arrived.pages, arrived.runs) == (3, 3)
        assert ear.event("t", Stage.SENT).late_bytes == arrived.bytes == 3 * len(payload(0))


async def test_a_transfer_of_pages_that_the_other_side_has_moves_nothing_by_nothing(
    start_store: Start, connect: Connect
) -> None:
    async with listening() as ear:
        p, d = [await asyncio.to_thread(start_store, name, 64, "", (ear.address,)) for name in ("store-p", "store-d")]
        for client in (connect(p, "p/1"), connect(d, "d/1")):
            await asyncio.to_thread(client.put, page_name(1), payload(1), 8)
        connect(p, "p/2").open_transfer("t", [page_name(1)], 8, d.address)
        await until_on_thread(lambda: {stage for _, stage in ear.stages("t")} == {Stage.SENT, Stage.ARRIVED})
        arrived = ear.event("t", Stage.ARRIVED)
        assert (arrived.transport, arrived.bytes, arrived.pages, arrived.runs) == (Transport.LOCAL, 0, 0, 0)
        assert ear.event("t", Stage.SENT).late_bytes == 0


async def test_a_prompt_that_is_there_already_arrives_at_once_with_no_bytes(
    start_store: Start, connect: Connect
) -> None:
    async with listening() as ear:
        store = await asyncio.to_thread(lambda: start_store(routers=(ear.address,)))
        client = connect(store)
        await asyncio.to_thread(client.put, page_name(1), payload(1), 8)
        client.open_transfer("t", [page_name(1)], 8, None)
        await until_on_thread(lambda: ear.stages("t") == [("store-0", Stage.ARRIVED)])
        arrived = ear.event("t", Stage.ARRIVED)
        assert (arrived.bytes, arrived.seconds) == (0, 0.0)


async def test_a_refused_transfer_fails_with_the_reason(start_store: Start, connect: Connect) -> None:
    async with listening() as ear:
        store = await asyncio.to_thread(lambda: start_store(routers=(ear.address,)))
        client = connect(store)
        client.open_transfer("far", [page_name(1)], 8, "192.0.2.1:9")
        client.open_transfer("odd", [page_name(1)], 80, None)
        await until_on_thread(lambda: ear.stages("far") and ear.stages("odd"))
        assert "store.peers" in ear.event("far", Stage.FAILED).reason
        assert "80 tokens" in ear.event("odd", Stage.FAILED).reason
        blamed = [ear.event(transfer, Stage.FAILED).unreachable for transfer in ("far", "odd")]
        assert blamed == [True, False], "the way from here to there"


async def test_the_end_of_a_writer_fails_its_transfer_once(start_store: Start, connect: Connect) -> None:
    async with listening() as ear:
        store = await asyncio.to_thread(lambda: start_store(routers=(ear.address,)))
        client = connect(store, grant_slots=1)
        (slot,) = await asyncio.to_thread(take, client, 1)
        client.open_transfer("t", [page_name(1)], 8, None)
        client.announce([NewPage(page_name(1), slot, 8)], "t")
        await until_on_thread(lambda: client.describe()["pages_filling"] == 1)
        await asyncio.to_thread(client.close)
        await until_on_thread(lambda: bool(ear.stages("t")))
        connect(store, "x/1").open_transfer("later", [page_name(1)], 8, "192.0.2.1:9")
        await until_on_thread(lambda: bool(ear.stages("later")))  # events come in their order
        assert ear.stages("t") == [("store-0", Stage.FAILED)]
        assert not ear.event("t", Stage.FAILED).unreachable


async def test_stores_test_their_paths_as_soon_as_a_router_names_their_peers(start_store: Start) -> None:
    peer = await asyncio.to_thread(lambda: start_store("store-1"))

    async with listening(tell=Neighbours(addresses=[peer.address, "192.0.2.1:9"])) as ear:
        await asyncio.to_thread(lambda: start_store(routers=(ear.address,)))
        await until_on_thread(lambda: any(link.rank == 2 for link in ear.links()))
        assert {link.peer for link in ear.links()} == {peer.address}  # another machine's was never dialled
        used = [link for link in ear.links() if link.rank]
        assert {link.transport for link in used} >= {Transport.TCP, Transport.SHM}
        assert all(link.bytes_per_s > 0 and link.latency_s > 0 for link in used)


async def test_a_store_tells_which_pages_it_has_to_who_asks(start_store: Start, connect: Connect) -> None:
    async with listening() as ear:
        store = await asyncio.to_thread(lambda: start_store(routers=(ear.address,)))
        client = await asyncio.to_thread(lambda: connect(store))
        await asyncio.to_thread(client.put, page_name(1), payload(1), 8)
        await until_on_thread(lambda: ear.channels != [])
        await ear.channels[0].send(PagesWanted(after=-1))
        await until_on_thread(lambda: ear.pages() == {page_name(1)})
        await asyncio.to_thread(client.put, page_name(2), payload(2), 8)
        await until_on_thread(lambda: ear.pages() == {page_name(1), page_name(2)})
