"""Dialling the streams of a path: all of them come, or none is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay import channel
from kvrelay.errors import Lost
from kvrelay.protocol.peer import Join, Met
from kvrelay.store.paths.streams import Streams

MET = Met(serial=1, ticket=b"t" * 16, transports=[])


class FakeLink:
    """A link that only notes what happens to it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_closed = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send(self, message: Any, **_options: Any) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    async def recv(self) -> None:
        await self.over

    def close(self) -> None:
        self.is_closed = True


class FakeLine:
    """What an opening of streams needs of a line."""

    stall_s = 1.0

    def __init__(self) -> None:
        self.watched: list[asyncio.Task[None]] = []

    def spawn(self, work: Any) -> None:
        self.watched.append(asyncio.ensure_future(work))


class Dials:
    """Stands for ``channel.connect``: dial number ``lost`` fails, and the one after it never ends."""

    def __init__(self, lost: int | None = None) -> None:
        self.links: list[FakeLink] = []
        self.dialled = 0
        self.cancelled = 0
        self._lost = lost

    async def connect(self, *_where: Any, **_who: Any) -> FakeLink:
        number, self.dialled = self.dialled, self.dialled + 1
        await asyncio.sleep(0)
        if self._lost is not None and number == self._lost:
            await asyncio.sleep(0)
            raise Lost("planted")
        if self._lost is not None and number == self._lost + 1:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        self.links.append(FakeLink())
        return self.links[-1]


async def open_streams(line: FakeLine, count: int) -> Streams:
    return await Streams.open(line, "peer:1", b"k" * 32, "p", MET, count)  # type: ignore[arg-type]


async def test_every_stream_shows_the_ticket_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dials, line = Dials(), FakeLine()
    monkeypatch.setattr(channel, "connect", dials.connect)
    await open_streams(line, 4)
    assert [link.sent for link in dials.links] == [[Join(ticket=MET.ticket)]] * 4
    for task in line.watched:
        task.cancel()


async def test_when_one_dial_fails_no_link_and_no_dial_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    dials, line = Dials(lost=2), FakeLine()
    monkeypatch.setattr(channel, "connect", dials.connect)
    with pytest.raises(Lost, match="planted"):
        await open_streams(line, 4)
    assert (dials.dialled, dials.cancelled, len(dials.links)) == (4, 1, 2)
    assert all(link.is_closed for link in dials.links)
