"""What is refused before it gets to the application."""

from __future__ import annotations

import asyncio
import json
import logging
from urllib.parse import urlsplit

import pytest

from kvrelay.router.connection import Refusals
from kvrelay.types import Role
from tests.patience import PATIENCE_S
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
