"""Tests of router/upstream.py and router/wire.py: calls to workers, over real sockets, with every way to break off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvrelay.errors import Lost
from kvrelay.router import upstream
from kvrelay.router.shortage import Shortage
from kvrelay.router.upstream import Reply, Target, Upstream
from kvrelay.router.wire import HELD_BYTES, MAX_HEAD_BYTES, Wire
from tests.held_port import held_port
from tests.patience import PATIENCE_S, until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\n"
TWO = OK + b"content-length: 2\r\n\r\nhi"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n4\r\ndata\r\n5\r\n: x\n\n\r\n0\r\n\r\n"


class Server:
    """Answers every request with ``answer`` and keeps what it was sent, by connection."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.heads: list[list[bytes]] = []
        self.hung_up = asyncio.Event()
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads: list[bytes] = []
        self.heads.append(heads)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                await reader.readexactly(4)
                await self._answer(reader, writer)
        self.hung_up.set()
        writer.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()


def says(*pieces: bytes, then_closes: bool = False) -> Answer:
    """Writes ``pieces`` one after the other."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if then_closes:
            writer.close()

    return answer


@pytest.fixture
async def client() -> AsyncIterator[Upstream]:
    made = Upstream(connect_s=PATIENCE_S, engine_key="secret", shortage=Shortage(time.monotonic))
    yield made
    await made.close()


async def ask(client: Upstream, server: Server) -> tuple[int, bytes]:
    reply = await client.post(f"{server.url}/v1/completions", b"body", request_id="r1")
    return reply.status, await reply.read()


async def test_a_request_says_who_asks_and_how_long_it_is(client: Upstream) -> None:
    async with Server(says(TWO)).serve() as server:
        assert await ask(client, server) == (200, b"hi")
    lines = server.heads[0][0].split(b"\r\n")
    assert lines[0] == b"POST /v1/completions HTTP/1.1"
    assert {b"authorization: Bearer secret", b"x-request-id: r1", b"content-length: 4"} <= set(lines)


@pytest.mark.parametrize("whole", [TWO, CHUNKED])
async def test_an_answer_may_come_in_any_pieces(client: Upstream, whole: bytes) -> None:
    expected = b"hi" if whole is TWO else b"data: x\n\n"
    for at in range(1, len(whole), 7):
        async with Server(says(whole[:at], whole[at:])).serve() as server:
            assert await ask(client, server) == (200, expected)


async def test_a_connection_is_used_again_once_its_answer_is_read(client: Upstream) -> None:
    async with Server(says(CHUNKED)).serve() as server:
        for _ in range(3):
            await ask(client, server)
        assert [len(heads) for heads in server.heads] == [3]
        assert repr(client) == "<Upstream 1 idle connections>"


async def test_two_requests_at_a_time_have_two_connections(client: Upstream) -> None:
    async with Server(says(CHUNKED)).serve() as server:
        await asyncio.gather(ask(client, server), ask(client, server))
        assert len(server.heads) == 2


async def test_an_idle_connection_is_dropped_in_time(client: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "KEEPALIVE_S", 0.01)
    async with Server(says(TWO)).serve() as server:
        await ask(client, server)
        await server.hung_up.wait()
        assert repr(client) == "<Upstream 0 idle connections>"
        assert await ask(client, server) == (200, b"hi")


@pytest.mark.parametrize(
    "answer",
    [
        says(OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi"),
        says(TWO + b"HTTP/1.1 200 "),
        says(TWO + TWO),
    ],
)
async def test_a_connection_that_must_not_be_used_again_is_closed(client: Upstream, answer: Answer) -> None:
    async with Server(answer).serve() as server:
        assert await ask(client, server) == (200, b"hi")
        assert await ask(client, server) == (200, b"hi")
        assert [len(heads) for heads in server.heads] == [1, 1]


async def test_a_body_without_a_length_ends_with_the_connection(client: Upstream) -> None:
    async with Server(says(OK + b"\r\nhi", b" there", then_closes=True)).serve() as server:
        assert await ask(client, server) == (200, b"hi there")


async def test_a_status_that_announces_another_is_passed_over(client: Upstream) -> None:
    async with Server(says(b"HTTP/1.1 100 Continue\r\n\r\n", TWO)).serve() as server:
        assert await ask(client, server) == (200, b"hi")


@pytest.mark.parametrize("cut", [TWO[:-1], CHUNKED[:-3], CHUNKED[:-12]])
async def test_an_answer_that_is_cut_short_is_never_taken_for_a_whole_one(client: Upstream, cut: bytes) -> None:
    async with Server(says(cut, then_closes=True)).serve() as server:
        reply = await client.post(f"{server.url}/x", b"body")
        with pytest.raises(Lost, match="broke off"):
            await reply.read()


@pytest.mark.parametrize(
    "answer",
    [
        says(then_closes=True),
        says(OK, then_closes=True),
        says(b"what?\r\n\r\n"),
        says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhi"),
        says(OK, *[b"x-many: headers\r\n" * 1000] * (MAX_HEAD_BYTES // 17_000 + 1)),
    ],
)
async def test_what_is_no_answer_is_a_lost_worker(client: Upstream, answer: Answer) -> None:
    async with Server(answer).serve() as server:
        with pytest.raises(Lost, match="cannot be reached or hung up"):
            await client.post(f"{server.url}/x", b"body")


async def test_nobody_there_is_a_lost_worker(client: Upstream) -> None:
    with held_port() as port, pytest.raises(Lost, match="ConnectionRefusedError"):
        await client.post(f"http://127.0.0.1:{port}/x", b"body")


@pytest.mark.parametrize("headed", [False, True])
async def test_a_call_that_nobody_waits_for_hangs_up(client: Upstream, headed: bool) -> None:
    async with Server(says(OK + b"content-length: 9\r\n\r\n") if headed else says()).serve() as server:
        calling = asyncio.create_task(client.post(f"{server.url}/x", b"body"))
        if headed:
            (await calling).close()
        else:
            await until(lambda: server.heads and server.heads[0])
            calling.cancel()
        await asyncio.wait_for(server.hung_up.wait(), PATIENCE_S)


async def test_a_worker_that_writes_faster_than_anybody_reads_has_to_wait(client: Upstream) -> None:
    size = 64 << 20
    written = 0

    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(bytes(1 << 20))
            written += 1 << 20
            await writer.drain()

    async with Server(flood).serve() as server:
        reply = await client.post(f"{server.url}/x", b"body")
        await until(lambda: written > HELD_BYTES)
        before = -1
        while written > before:  # until it has to wait
            before = written
            await asyncio.sleep(0.1)
        assert written < size
        assert len(await reply.read()) == size


async def test_an_answer_over_the_limit_is_given_up(client: Upstream) -> None:
    async with Server(says(CHUNKED)).serve() as server:
        reply = await client.post(f"{server.url}/x", b"body")
        with pytest.raises(Lost, match="over the limit"):
            await reply.read(limit=3)
        await asyncio.wait_for(server.hung_up.wait(), PATIENCE_S)


async def test_events_come_as_soon_as_they_are_whole(client: Upstream) -> None:
    go_on = asyncio.Event()

    async def stream(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n7\r\ndata: 2\r\n")
        await go_on.wait()
        writer.write(b"2\r\n\n\n\r\n0\r\n\r\n")

    async with Server(stream).serve() as server:
        blocks = (await client.post(f"{server.url}/x", b"body")).events()
        assert await anext(blocks) == b"data: 1\n\n"
        go_on.set()
        assert [block async for block in blocks] == [b"data: 2\n\n"]


class Idle(asyncio.Transport):
    """Sends nowhere; what is received is up to the test."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__({"socket": sock})

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Nobody reads it."""

    def abort(self) -> None:
        """Nothing is open."""


async def test_blocks_that_somebody_takes_at_once_are_not_given_out_and_all_others_are_in_order(
    client: Upstream,
) -> None:
    events = [b"data: %d\n\n" % number for number in range(6)]
    taken: list[bytes] = []

    def take(block: bytes) -> bool:
        if block != events[3]:
            taken.append(block)
        return block != events[3]

    async def read() -> list[bytes]:
        return [block async for block in reply.events()]

    wire = Wire()
    with socket.socket() as sock:
        wire.connection_made(Idle(sock))
        sending = asyncio.create_task(wire.send(b"request"))
        await asyncio.sleep(0)
        wire.data_received(OK + b"transfer-encoding: chunked\r\n\r\n")
        reply = Reply(client, Target("host", 1, is_tls=False), wire, await sending)
        reply.pass_to(take)
        reading = asyncio.create_task(read())
        for piece in (events[0], events[1], b"data:", b" 2\n\n", events[3], events[4] + events[5]):
            await asyncio.sleep(0)
            wire.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
        wire.data_received(b"0\r\n\r\n")
        assert await reading == [events[2], events[3]]
        assert taken == [events[0], events[1], events[4] + events[5]]
        assert repr(client) == "<Upstream 1 idle connections>"
