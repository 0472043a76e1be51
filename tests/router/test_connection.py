"""What is refused before it gets to the application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from kvrelay.router import clients, connection
from kvrelay.router.connection import Refusals
from kvrelay.types import Role
from tests.patience import CANCELLED_S, LEEWAY, PATIENCE_S, until
from tests.router.cluster import Cluster

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def exchange(cluster: Cluster, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the first answer to ``sent``; the connection is closed after it."""
    where = urlsplit(cluster.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b"no http\r\n\r\n", 400, ""),
        (POST + b"content-encoding: br\r\ncontent-length: 2\r\n\r\n{}", 400, "content-encoding"),
        (POST + b"x-long: " + b"x" * 20_000 + b"\r\n\r\n", 400, ""),
        (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400, ""),
        (POST + b"content-length: -1\r\n\r\n", 400, ""),
        (POST + b"expect: wonders\r\ncontent-length: 2\r\n\r\n{}", 417, "wonders"),
        (b"GET /gone HTTP/1.1\r\nhost: x\r\nexpect: wonders\r\n\r\n", 417, "wonders"),
    ],
)
async def test_what_is_no_http_is_refused_in_openais_shape_and_names_no_software(
    cluster: Cluster, sent: bytes, status: int, says: str
) -> None:
    await cluster.add("b1", Role.BOTH)
    answered, headers, body = await exchange(cluster, sent)
    error = json.loads(body)["error"]
    assert (answered, error["code"], headers["content-type"]) == (status, status, "application/json")
    assert headers["server"] == "kvrelay"
    assert headers["x-request-id"].startswith("req-")
    assert says in error["message"].lower()
    assert "aiohttp" not in str(headers) + body.decode()


async def test_rubbish_is_logged_in_a_line_and_much_of_it_not_each_time(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.add("b1", Role.BOTH)
    for _ in range(20):
        await exchange(cluster, POST + b"content-length: -1\r\n\r\n")
    logged = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(logged) < 20
    assert "127.0.0.1" in logged[0].getMessage()
    assert not any(each.exc_info or "\n" in each.getMessage() for each in logged)


def test_what_was_not_logged_is_counted_in_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    refusals = Refusals(lambda: now_s[0])
    for seconds in (0.0, 1.0, 9.0, 11.0, 12.0):
        now_s[0] = seconds
        refusals.add("10.0.0.1", "no HTTP")
    said = [each.getMessage().partition("(")[2] for each in caplog.records]
    assert said == ["0 more since the last such line)", "2 more since the last such line)"]


async def test_a_client_that_waits_for_100_continue_gets_it(cluster: Cluster) -> None:
    await cluster.add("b1", Role.BOTH)
    where = urlsplit(cluster.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    body = b'{"model":"tiny","prompt":"Hello"}'
    async with asyncio.timeout(PATIENCE_S):
        writer.write(POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


# ---------------------------------------------------------------- clients that keep connections


@asynccontextmanager
async def connected(
    cluster: Cluster, sent: bytes = b""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has sent ``sent``, once the router knows of it."""
    before, where = len(cluster.router.clients), urlsplit(cluster.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(sent)
        await until(lambda: len(cluster.router.clients) != before or reader.at_eof())
        yield reader, writer
    finally:
        writer.close()


def generate(**more: object) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "Hello, you", **more}).encode()
    return POST + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
async def test_who_sends_no_whole_head_is_hung_up_on_in_time_and_told_so_if_it_said_something(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(clients, "HEAD_S", 0.3)
    async with asyncio.timeout(PATIENCE_S), connected(cluster, sent) as (reader, _):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else not answer
    assert not sent or json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408
    assert await cluster.metric('kvrelay_client_connections_ended_total{reason="silent"}') == 1


@pytest.mark.parametrize("then", [b"", b"GET /hea"])
async def test_a_connection_that_was_answered_is_kept_for_a_while_and_its_next_head_must_come_in_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, then: bytes
) -> None:
    monkeypatch.setattr(clients, "HEAD_S" if then else "KEEPALIVE_S", 0.3)
    async with asyncio.timeout(PATIENCE_S), connected(cluster) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"[]}")).startswith(b"HTTP/1.1 200 ")
        writer.write(then)
        rest = await reader.read()
    assert rest.startswith(b"HTTP/1.1 408 ") if then else not rest


@pytest.mark.slow
async def test_an_answer_may_take_longer_than_any_head_or_idle_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("HEAD_S", "KEEPALIVE_S"):
        monkeypatch.setattr(clients, limit, 0.2)
    worker = await cluster.add("b1", Role.BOTH)
    worker.hold.clear()
    async with asyncio.timeout(PATIENCE_S), connected(cluster, generate(stream=True)) as (reader, _):
        await until(lambda: worker.in_flight == 1)
        await asyncio.sleep(1.0)
        worker.hold.set()
        assert b"[DONE]" in await reader.read()


async def test_silent_clients_keep_nobody_out(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.add("b1", Role.BOTH)
    cluster.router.clients.descriptors = lambda: 8
    most = cluster.router.clients.most
    async with asyncio.timeout(PATIENCE_S), connected(cluster) as (first, _):
        where = urlsplit(cluster.url)
        silent = [await asyncio.open_connection(where.hostname, where.port) for _ in range(20 * most)]
        assert await first.read() == b""
        assert (await exchange(cluster, generate()))[0] == 200
        _, _, health = await exchange(cluster, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    for _, writer in silent:
        writer.close()
    assert len(cluster.router.clients) <= most
    assert json.loads(health)["status"] == "degraded"
    assert "open files" in json.loads(health)["why"]
    assert len([each for each in caplog.records if "open files" in each.getMessage()]) == 1


async def test_with_requests_on_all_connections_another_one_gets_503_and_health_is_served(cluster: Cluster) -> None:
    worker = await cluster.add("b1", Role.BOTH)
    worker.hold.clear()
    cluster.router.clients.descriptors = lambda: 4
    async with connected(cluster, generate()) as (reader, _):
        await until(lambda: worker.in_flight == 1)
        status, headers, body = await exchange(cluster, generate())
        assert (status, "retry-after" in headers, headers["connection"]) == (503, True, "close")
        assert "connections" in json.loads(body)["error"]["message"]
        assert (await exchange(cluster, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 200
        worker.hold.set()
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


# ---------------------------------------------------------------- what comes behind a request


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [generate(user="u" * 3_000_000), 1000 * generate()])
async def test_a_client_that_goes_away_is_missed_whatever_lies_unread_behind_its_request(
    cluster: Cluster, behind: bytes, stream: bool
) -> None:
    worker = await cluster.add("b1", Role.BOTH)
    worker.hold.clear()
    async with connected(cluster, generate(stream=stream)) as (_, writer):
        await until(lambda: worker.in_flight == 1)
        writer.write(behind)
        async with asyncio.timeout(PATIENCE_S):
            await writer.drain()
    await until(lambda: worker.aborted == 1, within_s=LEEWAY * CANCELLED_S)
    worker.hold.set()


async def test_an_answer_is_whole_whatever_lies_behind_its_request_and_ends_the_connection(cluster: Cluster) -> None:
    worker = await cluster.add("b1", Role.BOTH)
    worker.hold_words.clear()
    async with asyncio.timeout(PATIENCE_S), connected(cluster, generate(stream=True)) as (reader, writer):
        await until(lambda: worker.in_flight == 1)
        writer.write(generate(user="u" * 20_000_000))
        await writer.drain()  # no buffers between hold so much: the router has read most of it
        worker.hold_words.set()
        assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_who_sends_without_end_behind_a_request_is_hung_up_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_BEHIND_BYTES", 1 << 20)
    worker = await cluster.add("b1", Role.BOTH)
    worker.hold.clear()
    async with connected(cluster, generate()) as (_, writer):
        await until(lambda: worker.in_flight == 1)
        writer.write(generate(user="u" * 8_000_000))
        await until(lambda: worker.aborted == 1)
    worker.hold.set()


async def test_a_few_requests_may_follow_one_another_on_a_connection(cluster: Cluster) -> None:
    await cluster.add("b1", Role.BOTH)
    async with asyncio.timeout(PATIENCE_S), connected(cluster, 8 * generate()) as (reader, _):
        for _ in range(8):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))


@pytest.mark.slow
async def test_who_takes_nothing_of_a_long_answer_is_hung_up_on_and_who_takes_it_slowly_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "STALL_S", 1.0)
    await cluster.add("b1", Role.BOTH, words=["long " * 4_000_000])
    stalled = 'kvrelay_client_connections_ended_total{reason="stalled"}'
    async with connected(cluster, generate()), connected(cluster, generate()) as (reader, _):
        async with asyncio.timeout(PATIENCE_S):
            while not await cluster.metric(stalled):
                assert await reader.read(1 << 17)
                await asyncio.sleep(0.05)
        assert await cluster.metric(stalled) == 1
        assert await reader.read(1)
