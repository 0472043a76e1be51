"""Connections between stores that drop, crawl or go silent half-way: pages arrive by what is left, or the push ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.channel import bind_tcp
from kvrelay.types import Transport
from tests.patience import until
from tests.store.conftest import payload
from tests.store.test_paths import BIG, Ends, Store

pytestmark = pytest.mark.slow

PIECE = 16 << 10
PAGES = 24


class Wire:
    """One connection through the proxy."""

    def __init__(self) -> None:
        self.moved = 0
        """Bytes from the sender."""
        self.is_silent = False
        """Nothing comes through any more, in either direction, and nobody is told."""
        self.pause_s = 0.0
        """After each piece from the sender."""
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    def start(self, ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        (near_in, near_out), (far_in, far_out) = ends
        self._writers = [near_out, far_out]
        self._tasks = [
            asyncio.create_task(self._pass_on(near_in, far_out, is_forward=True)),
            asyncio.create_task(self._pass_on(far_in, near_out, is_forward=False)),
        ]

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE):
                while self.is_silent:
                    await asyncio.sleep(0.05)
                self.moved += len(data) if is_forward else 0
                target.write(data)
                await target.drain()
                if is_forward and self.pause_s:
                    await asyncio.sleep(self.pause_s)
        self.cut()

    def cut(self) -> None:
        """Both ends see the connection break."""
        for writer in self._writers:
            writer.transport.abort()

    def stop(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()


class Proxy:
    """A TCP proxy in front of a store; the first wire is the link of the pushes, the others carry data."""

    def __init__(self, target: Store) -> None:
        self._target = target
        self.wires: list[Wire] = []
        self.address = ""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        listener = bind_tcp("127.0.0.1", 0)
        # What a larger buffer has taken looks delivered, and it tells the sender of more room once it is half empty.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PIECE)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=PIECE)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.address.rpartition(":")
        wire = Wire()
        self.wires.append(wire)
        wire.start([(reader, writer), await asyncio.open_connection(host, int(port), limit=PIECE)])

    @property
    def data(self) -> list[Wire]:
        return self.wires[1:]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for wire in self.wires:
            wire.stop()


class Linked:
    """Two stores with the proxy between them, and one push under way."""

    def __init__(self, ends: Ends, proxy: Proxy) -> None:
        self.ends, self.proxy = ends, proxy

    def push(self) -> None:
        for number in range(PAGES):
            self.ends.p.put(number, 32, format=BIG)
        target: Any = self.proxy
        self.ends.p.push("t", range(PAGES), 32 * PAGES, target, BIG)

    async def arrives(self) -> None:
        d = self.ends.d
        await until(lambda: d.keeper.counts["transfers_arrived"] == 1, within_s=90)
        assert all(d.read(number) == payload(number, 32, BIG) for number in range(PAGES))
        await self.ends.settled()
        assert d.keeper.counts["checksum_failures"] == 0

    async def under_way(self, size_bytes: int) -> None:
        before = sum(wire.moved for wire in self.proxy.data)
        await until(lambda: sum(wire.moved for wire in self.proxy.data) > before + size_bytes)


@pytest.fixture
async def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Linked]:
    monkeypatch.setattr("kvrelay.store.paths.choice.RETRY_S", 3600.0)  # what is lost is not there again meanwhile
    ends = Ends(tmp_path, Transport.TCP, stall_s=3.0)
    await ends.ready()
    proxy = Proxy(ends.d)
    await proxy.start()
    ends.p.daemon.peers.meet([proxy.address])
    await until(lambda: any(report.rank for report in ends.p.daemon.peers.reports))
    for wire in proxy.data:
        wire.pause_s = 0.001
    yield Linked(ends, proxy)
    proxy.stop()
    await ends.p.stop()
    await ends.d.stop()


async def test_a_stream_that_breaks_in_the_middle_has_its_batch_sent_by_another(linked: Linked) -> None:
    linked.push()
    await linked.under_way(1 << 20)
    linked.proxy.data[0].cut()
    await linked.arrives()
    assert any(report.rank for report in linked.ends.p.daemon.peers.reports), linked.ends.p.daemon.peers.reports


async def test_a_stream_that_goes_silent_is_given_up_and_its_batch_sent_by_another(linked: Linked) -> None:
    linked.push()
    await linked.under_way(1 << 20)
    linked.proxy.data[0].is_silent = True
    await linked.arrives()


async def test_when_all_streams_break_the_link_of_the_pushes_carries_the_rest(linked: Linked) -> None:
    linked.push()
    await linked.under_way(1 << 20)
    for wire in linked.proxy.data:
        wire.cut()
    await linked.arrives()
    assert linked.proxy.wires[0].moved > 1 << 20


async def test_a_throttled_link_is_slow_and_nothing_else(linked: Linked) -> None:
    for wire in linked.proxy.data:
        wire.pause_s = 0.003
    linked.push()
    await linked.arrives()
    assert linked.ends.p.keeper.counts["pushes_failed"] == 0


async def test_the_end_of_the_link_of_the_pushes_ends_them_and_frees_every_slot(linked: Linked) -> None:
    linked.push()
    await linked.under_way(1 << 20)
    linked.proxy.wires[0].cut()
    await until(lambda: linked.ends.p.keeper.counts["pushes_failed"] == 1)
    await until(lambda: linked.ends.d.keeper.counts["transfers_failed"] == 1)
    await linked.ends.settled()


async def test_a_peer_that_goes_silent_altogether_costs_the_stall_limit_and_no_more(linked: Linked) -> None:
    linked.push()
    await linked.under_way(1 << 20)
    for wire in linked.proxy.wires:
        wire.is_silent = True
    await until(lambda: linked.ends.p.keeper.counts["pushes_failed"] == 1)
    assert linked.ends.p.keeper.describe()["pages_pinned"] == 0
    linked.proxy.stop()
    await linked.ends.settled()
