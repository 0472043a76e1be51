"""A batch that is begun again: what of it still comes elsewhere ends first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from kvrelay.channel import Channel
from kvrelay.store.underway import UnderWay


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


async def test_a_batch_that_nobody_receives_is_begun_at_once() -> None:
    await UnderWay().supersede(1)


async def test_a_batch_that_is_begun_again_waits_for_the_link_that_it_ends(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    under_way, link = UnderWay(), Channel(sockets[0])
    with under_way.receiving(1, link):
        await under_way.supersede(2)
        assert not link.over.done()
        again = asyncio.create_task(under_way.supersede(1))
        await link.over
        await asyncio.sleep(0)
        assert not again.done()
    await again


async def test_a_batch_that_is_here_already_is_waited_for() -> None:
    under_way = UnderWay()
    with under_way.receiving(1, None):
        again = asyncio.create_task(under_way.supersede(1))
        await asyncio.sleep(0)
        assert not again.done()
    await again


async def test_of_two_that_begin_a_batch_again_the_second_ends_the_first(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    under_way, link = UnderWay(), Channel(sockets[0])

    async def first() -> None:
        await under_way.supersede(1)
        with under_way.receiving(1, link):
            await link.over

    with under_way.receiving(1, None):
        tasks = [asyncio.create_task(first()), asyncio.create_task(under_way.supersede(1))]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert link.over.done()
