"""A ticket leads a further link to the pushes of the link that got it, while that one lasts, and to nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay import channel
from kvrelay.channel import Channel, connect
from kvrelay.errors import Lost
from kvrelay.protocol.peer import (
    ArenaFound,
    FindArena,
    Join,
    Meet,
    Met,
    PushOpen,
    PushPages,
    PushWanted,
    Segments,
    Taken,
)
from kvrelay.store.arena import checksums
from kvrelay.store.reception import MAX_LINKS
from tests.patience import PATIENCE_S, until
from tests.store.conftest import FORMAT, KEY, manifest, page_name, payload
from tests.store.test_paths import CONTROL, Ends, ends_of


class Peer:
    """A sending store, by hand: its link of pushes, and its ticket."""

    def __init__(self, link: Channel, ticket: bytes) -> None:
        self.link, self.ticket = link, ticket

    async def offer(self, transfer: str, number: int) -> list[int]:
        await self.link.send(PushOpen(transfer=transfer, format=FORMAT, names=[page_name(number)], total_tokens=8))
        await self.link.send(PushPages(transfer=transfer, indices=[0]))
        return (await channel.expect(self.link, PushWanted)).indices


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Ends]:
    async with ends_of(tmp_path, CONTROL) as both:
        yield both
        await both.settled()
        assert both.d.keeper.describe()["links_crashed"] == 0


@contextlib.asynccontextmanager
async def peer(ends: Ends, name: str) -> AsyncIterator[Peer]:
    link = await connect(ends.d.address, KEY, sender=name, purpose="peer")
    await link.send(Meet(serial=1))
    met = await channel.expect(link, Met)
    yield Peer(link, met.ticket)
    link.close()


async def data_link(ends: Ends, ticket: bytes) -> Channel:
    link = await connect(ends.d.address, KEY, sender="p", purpose="data")
    await link.send(Join(ticket=ticket))
    return link


async def map_link(ends: Ends) -> Channel:
    return await connect(Path(ends.d.local.getsockname()), KEY, sender="p", purpose="map")


async def find_arena(link: Channel, ticket: bytes) -> None:
    """Ask for the arena, get it, and want no descriptor."""
    await link.send(FindArena(serial=1, format=FORMAT, ticket=ticket))
    async with asyncio.timeout(PATIENCE_S):
        await channel.expect(link, ArenaFound)
    for descriptor in link.take_fds():
        os.close(descriptor)


def page(transfer: str, number: int) -> tuple[Segments, list[memoryview]]:
    data = memoryview(payload(number))
    sums = checksums(data, FORMAT.segment_bytes)
    message = Segments(
        transfer=transfer,
        manifest=manifest(*((0, layer, [each]) for layer, each in enumerate(sums))),
        payload_bytes=len(data),
        serial=7,
    )
    return message, [data]


def has_begun(ends: Ends) -> bool:
    """Whether the payload of a batch is coming in."""
    transfer = ends.d.keeper.transfers.get("t")
    return transfer is not None and transfer.traffic.first_at is not None


async def is_cut_off(link: Channel) -> bool:
    with contextlib.suppress(Lost):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await link.recv()
    return True


async def test_a_stream_with_another_peers_ticket_cannot_reach_the_pushes_of_its_own(pair: Ends) -> None:
    async with peer(pair, "one") as one, peer(pair, "two") as two:
        assert await one.offer("t", 1) == [0]
        stream = await data_link(pair, two.ticket)
        await stream.send(*page("t", 1))
        async with asyncio.timeout(PATIENCE_S):
            assert (await channel.expect(two.link, Taken)).serial == 7
        assert pair.d.page(1) is not None
        assert pair.d.page(1).layers_in == 0  # type: ignore[union-attr]
        right = await data_link(pair, one.ticket)
        await right.send(*page("t", 1))
        await until(lambda: pair.d.read(1) == payload(1))


@pytest.mark.parametrize("ticket", [b"", b"\0" * 16, b"x" * 5000], ids=["none", "zeros", "long"])
async def test_a_ticket_that_nobody_got_ends_its_link(pair: Ends, ticket: bytes) -> None:
    async with peer(pair, "one"):
        assert await is_cut_off(await data_link(pair, ticket))
        link = await map_link(pair)
        await link.send(FindArena(serial=1, format=FORMAT, ticket=ticket))
        assert await is_cut_off(link)


async def test_a_ticket_is_void_once_its_link_is_over(pair: Ends) -> None:
    async with peer(pair, "one") as one:
        ticket = one.ticket
        assert await one.offer("t", 1) == [0]
        early = await data_link(pair, ticket)
        mapped = await map_link(pair)
        await find_arena(mapped, ticket)
    assert await is_cut_off(early)
    assert await is_cut_off(mapped)
    late = await data_link(pair, ticket)
    with contextlib.suppress(Lost):
        await late.send(*page("t", 1))
    assert await is_cut_off(late)
    again = await map_link(pair)
    await again.send(FindArena(serial=1, format=FORMAT, ticket=ticket))
    assert await is_cut_off(again)
    await until(lambda: pair.d.page(1) is None)


async def test_a_link_that_ends_while_a_stream_is_in_the_middle_of_a_page_leaves_nothing(pair: Ends) -> None:
    async with peer(pair, "one") as one:
        assert await one.offer("t", 1) == [0]
        stream = await data_link(pair, one.ticket)
        message, (data,) = page("t", 1)
        await stream.send(message, [data[: len(data) // 2]])
        await until(lambda: has_begun(pair))
    assert await is_cut_off(stream)
    await until(lambda: pair.d.is_idle)
    assert pair.d.page(1) is None


async def test_an_arena_link_counts_once_however_often_it_asks(pair: Ends) -> None:
    async with peer(pair, "one") as one:
        streams = [await data_link(pair, one.ticket) for _ in range(MAX_LINKS - 1)]
        mapped = await map_link(pair)
        await find_arena(mapped, one.ticket)
        await find_arena(mapped, one.ticket)
        for link in (*streams, mapped):
            link.close()


async def test_an_arena_link_that_changes_its_ticket_ends_and_leaves_nothing_with_the_first_peer(pair: Ends) -> None:
    async with peer(pair, "one") as one, peer(pair, "two") as two:
        for _ in range(MAX_LINKS + 1):
            mapped = await map_link(pair)
            await find_arena(mapped, one.ticket)
            await mapped.send(FindArena(serial=2, format=FORMAT, ticket=two.ticket))
            assert await is_cut_off(mapped)
