"""Tests of benchmarks/routers: mocks that answer like vLLM, clients that miss nothing, a table that hides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from benchmarks import http_stacks
from benchmarks.routers import mock, wire
from benchmarks.routers.clients import Load, Spec
from benchmarks.routers.table import Row, render, rows

REQUEST = wire.request("h", "/v1/completions", b"{}")
STREAM = wire.STREAM_HEAD + wire.chunk(b"data: 1\n\n") + wire.chunk(b"data: [DONE]\n\n") + wire.LAST_CHUNK


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """An engine that ticks."""
    (engine,), ticker = await mock.serve(1, 0.001, None)
    ticking = asyncio.create_task(ticker.run())
    yield engine.port
    ticking.cancel()


def test_requests_may_come_in_any_pieces() -> None:
    data = REQUEST + REQUEST
    for at in range(len(data)):
        inbox = wire.Inbox()
        found = [*inbox.feed(data[:at]), *inbox.feed(data[at:])]
        assert found == [(b"/v1/completions", b"{}")] * 2


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (wire.answer(b'{"text":"0\\r\\n\\r\\n"}'), 0),
        (STREAM, 2),
        # An id in the head that ends like a stream does.
        (STREAM.replace(b"\r\n\r\n", b"\r\nx-request-id: req-0\r\n\r\n", 1), 2),
    ],
)
def test_an_answer_is_over_with_its_last_byte_and_not_before(data: bytes, events: int) -> None:
    for at in range(1, len(data)):
        outcome = wire.Outcome()
        assert (outcome.feed(data[:at]), outcome.feed(data[at:])) == (False, True)
        assert outcome.status == 200
    assert outcome.events == events


async def test_a_mock_answers_in_the_engines_shape(port: int) -> None:
    body = {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 2, "kv_transfer_params": {"do_remote_decode": True}}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        async with http.post("/v1/completions", json=body) as response:
            answer = await response.json()
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["kv_transfer_params"]["do_remote_prefill"] is True
        async with http.post("/v1/completions", json={**body, "stream": True}) as response:
            events = (await response.read()).split(b"\n\n")
    assert [event[:6] for event in events] == [b"data: ", b"data: ", b"data: ", b""]
    assert events[2] == b"data: [DONE]"


@pytest.mark.parametrize("name", ["aiohttp", "protocol"])
async def test_servers_that_are_compared_answer_the_same_load(name: str) -> None:
    port = await http_stacks.STARTS[name]()
    seen = await Load(Spec(port=port, model="m", texts=["x"], max_tokens=1, clients=2, requests=10, warm_s=0.0)).run()
    assert (seen.failed, seen.p50_ms > 0) == (0, True)


async def test_clients_count_every_event_of_every_stream(port: int) -> None:
    spec = Spec(
        port=port, model="mock", texts=["hello"], max_tokens=5, stream=True, clients=3, requests=30, warm_s=0.01
    )
    seen = await Load(spec).run()
    assert (seen.requests, seen.failed, seen.events) == (30, 0, 150)
    assert seen.p50_ms > 0
    assert seen.next > 30


async def test_clients_that_come_at_a_rate_wait_for_nobody(port: int) -> None:
    spec = Spec(port=port, model="mock", texts=["x"], max_tokens=50, stream=True, rate=500.0, requests=40, warm_s=0.01)
    assert (await Load(spec).run()).requests == 40


async def test_refusals_are_counted_as_failures() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(wire.answer(b"{}", b"503 Service Unavailable"))

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    seen = await Load(Spec(port=port, model="m", texts=["x"], max_tokens=1, clients=1, requests=3, warm_s=0.0)).run()
    assert seen.failed == seen.requests
    server.close()


def part(requests_per_s: float, router_cpu_ms: float) -> dict[str, Any]:
    core = round(1e3 / router_cpu_ms, 1)
    cores = {"cores": {"router": 0.95, "mocks": 0.2}, "bottleneck": "router"}
    return {"requests_per_s": requests_per_s, "router_cpu_ms": router_cpu_ms, "requests_per_s_per_core": core, **cores}


def row(found: dict[str, Any], what: str) -> Row:
    return next(each for each in rows(found) if what in each.what)


def test_stages_that_did_not_run_give_no_rows() -> None:
    assert rows({"machine": {"cores": 2}}) == []


@pytest.mark.parametrize(("ours_ms", "dynamo_ms", "met"), [(1.1, 0.9, True), (1.2, 0.9, False), (1.2, 1.3, True)])
def test_processor_time_is_held_against_the_peer_and_the_target(ours_ms: float, dynamo_ms: float, met: bool) -> None:
    found = {"kvrelay": {"short": part(900, ours_ms)}, "dynamo": {"short": part(853, dynamo_ms)}}
    assert row(found, "short prompts: router CPU").met is met
    assert row(found, "short prompts: requests/s").met is True


def test_without_the_peer_nothing_is_said_to_be_met() -> None:
    found = {"kvrelay": {"short": part(900, 1.0)}, "dynamo": {"left_out": "no namespaces"}}
    assert row(found, "requests/s").met is None
    assert "Dynamo was left out: no namespaces" in render(found)


@pytest.mark.parametrize(("ours_ms", "met"), [(3.0, True), (3.1, False)])
def test_what_the_mocks_take_is_not_the_routers(ours_ms: float, met: bool) -> None:
    found = {"mocks": {"ttft": {"p50_ms": 1.0}}, "kvrelay": {"ttft": {"p50_ms": ours_ms}}}
    assert row(found, "TTFT").met is met


@pytest.mark.parametrize(("last", "met"), [(131.0, True), (140.0, False), (301.0, False)])
def test_memory_has_to_be_flat_as_well_as_small(last: float, met: bool) -> None:
    found = {"kvrelay-memory": {"requests": 100_000, "rss_mb": [90.0, 120.0, 128.0, 129.0, 130.0, last]}}
    assert row(found, "memory").met is met
    assert f"100,000 distinct prefixes (last 40,000: {last - 129.0:+.1f} MB)" in row(found, "memory").what


def test_the_table_says_whose_core_was_full() -> None:
    assert "router 0.95, mocks 0.20; full: router" in render({"kvrelay": {"short": part(900, 1.0)}})
