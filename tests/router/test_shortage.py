"""A router without descriptors of its own: no worker is blamed for it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.policy.breaker import State
from kvrelay.router import stream_resumption, upstream
from kvrelay.router.upstream import Target, Upstream
from kvrelay.router.wire import Wire
from kvrelay.types import Role
from tests.fleet.values import store
from tests.patience import until
from tests.router.cluster import Cluster
from tests.router.scripted_fleet import TEXT, Fleet, running

REQUESTS = 12


class Descriptors:
    """Connections to workers fail while there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.EMFILE) -> None:
        self.left: float = float("inf")
        self.refused = 0
        connect = Upstream.connect

        async def connected(self_: Upstream, target: Target) -> Wire:
            if self.left <= 0:
                self.refused += 1
                raise OSError(number, "no more")
            self.left -= 1
            return await connect(self_, target)

        monkeypatch.setattr(upstream, "KEEPALIVE_S", 0.0)
        monkeypatch.setattr(Upstream, "connect", connected)


def breakers(cluster: Cluster) -> set[State]:
    return {cluster.router.brain.outcomes.breakers.of(name).state for name in cluster.workers}


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
@pytest.mark.parametrize("split", [False, True])
async def test_no_worker_is_blamed_and_the_client_is_told_what_is_missing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, split: bool, number: int
) -> None:
    if split:
        await cluster.split()
    else:
        await cluster.join(store())
        await cluster.add("b1", Role.BOTH)
    descriptors = Descriptors(monkeypatch, number)
    descriptors.left = 0
    for index in range(REQUESTS):
        body = {"model": "tiny", "prompt": "Hello, you", "stream": bool(index % 2)}
        status, answer, headers = await cluster.post("/v1/completions", body)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "descriptor" in answer["error"]["message"]
    assert breakers(cluster) == {State.CLOSED}
    status, health = await _health(cluster)
    assert (status, health["status"]) == (200, "degraded")
    assert "descriptor" in str(health["why"])
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([line for line in lines if "limit of open files" in line]) == 1
    assert await cluster.metric('kvrelay_router_shortages_total{of="descriptors"}') == REQUESTS
    descriptors.left = 1000
    assert (await cluster.complete())["choices"][0]["text"]


async def _health(cluster: Cluster) -> tuple[int, dict[str, object]]:
    async with cluster.http.get("/health") as response:
        return response.status, json.loads(await response.read())


async def test_a_worker_is_compared_later_when_there_is_no_descriptor_to_ask_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = Descriptors(monkeypatch)
    descriptors.left = 0
    worker = await cluster.add("b1", Role.BOTH, checked=False)
    await until(lambda: descriptors.refused > 1)
    descriptors.left = 1000
    await until(lambda: len(worker.calls) >= 5)


@pytest.fixture
async def fleet(model_folder: Path) -> AsyncIterator[Fleet]:
    async with running(model_folder) as fleet:
        yield fleet


async def test_an_answer_that_loses_its_worker_waits_for_a_descriptor_and_goes_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = Descriptors(monkeypatch)
    fleet.script.after = 3
    descriptors.left = 2  # for P, and for the first D
    asking = asyncio.create_task(fleet.ask())
    await until(lambda: descriptors.refused > 3)
    assert fleet.script.struck == 1
    descriptors.left = 1000
    answer = await asking
    assert (answer.texts, answer.last) == ({0: TEXT}, b"data: [DONE]")
    assert breakers(fleet.cluster) == {State.CLOSED}


async def test_an_answer_that_finds_no_descriptor_for_long_ends_with_the_reason(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_resumption, "EXHAUSTED_S", 0.2)
    descriptors = Descriptors(monkeypatch)
    fleet.script.after = 3
    descriptors.left = 2
    answer = await fleet.ask()
    assert b"[DONE]" not in answer.raw
    assert b"descriptor" in answer.last
