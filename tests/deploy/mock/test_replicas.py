"""Two routers over the same mock workers: what one's death costs, and how its successor learns what there is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.mock.node import MockNode
from kvrelay.deploy.mock.roster import mock_names
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.types import Medium
from tests.deploy.mock.test_mock_cluster import CONFIG, Mocks, prompt
from tests.patience import PATIENCE_S, until
from tests.router.cluster import KEY, Cluster

ROUTER = RouterConfig(port=0, control_port=0, local_prefill="never")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def first(tiny: Path) -> AsyncIterator[Cluster]:
    """A router that a test may end."""
    cluster = await Cluster(tiny, router_config=ROUTER).__aenter__()
    yield cluster
    await cluster.__aexit__(None, None, None)


@pytest.fixture
async def both(tiny: Path, first: Cluster) -> AsyncIterator[tuple[Mocks, Mocks]]:
    """Each router, with the workers that both of them know."""
    async with Cluster(tiny, router_config=ROUTER) as second:
        names = mock_names(2, 2, 0, stores=2)
        routers = (first.control, second.control)
        node = MockNode(Site(CONFIG, tiny, second.tokens, stores=names.stores, routers=routers, key=KEY), names.workers)
        ready = asyncio.Event()
        running = asyncio.create_task(node.run(lambda _: ready.set()))
        await ready.wait()
        mocks = Mocks(first, node), Mocks(second, node)
        for each in mocks:
            await each.ready()
        yield mocks
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.slow
async def test_a_dead_router_takes_its_own_connections_with_it_and_no_others(both: tuple[Mocks, Mocks]) -> None:
    one, other = both
    one.suffer(*one.node.workers, slow=8.0)
    theirs = asyncio.create_task(_raw_stream(one.cluster.url, prompt(0)))
    ours = asyncio.create_task(other.stream(prompt(1), 60))
    await until(lambda: other.cluster.router.brain.in_flight == one.cluster.router.brain.in_flight == 1)
    await until(lambda: sum(_written(one)) > 10)
    await one.cluster.__aexit__(None, None, None)
    tokens, last = await ours
    assert (tokens, last) == (other.answer(prompt(1), 60), b"data: [DONE]")
    assert not (await theirs).endswith(b"data: [DONE]\n\n")
    assert "loaded" in (await other.ask(prompt(2)))["events"]
    await other.cluster.at_rest()
    await until(lambda: all(worker.life and not worker.life.engine.scheduler.running for worker in _workers(one)))


async def _raw_stream(url: str, asked: list[int]) -> bytes:
    """What came until the connection ended, however it did."""
    body = {"model": "tiny", "prompt": asked, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    got = b""
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
        with suppress(aiohttp.ClientError):
            async for chunk in response.content.iter_any():
                got += chunk
    return got


def _workers(mocks: Mocks) -> Any:
    return list(mocks.node.workers.values())


def _written(mocks: Mocks) -> list[int]:
    return [worker.life.engine.scheduler.totals.written if worker.life else 0 for worker in _workers(mocks)]


async def test_both_routers_know_what_workers_hold_whoever_sent_it_there(both: tuple[Mocks, Mocks]) -> None:
    one, other = both
    await one.ask(prompt(0))
    for each in both:
        index = each.cluster.router.brain.index
        for worker in _workers(each):
            held = worker.life.log.held(Medium.HBM)
            await until(lambda index=index, worker=worker, held=held: index.count(worker.name) == held)  # type: ignore[misc]
    assert (await other.ask(prompt(0)))["cached_tokens"] >= 640


# ---------------------------------------------------------------- as processes


@pytest.mark.slow
async def test_a_killed_replica_is_started_again_and_the_other_one_serves_meanwhile(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Config(
        router=RouterConfig(port=0, control_port=0, replicas=2),
        cluster=ClusterConfig(prefill=2, decode=2, stores=2),
        mock=MockConfig(enabled=True, time_scale=0.05),
    )
    async with LocalCluster(config, run_dir=tmp_path_factory.mktemp("run"), model=tiny) as cluster:
        supervising = asyncio.create_task(cluster.wait())
        assert {"router", "router-1"} < set(cluster.names)
        before = cluster.pid("router-1")
        os.kill(before, signal.SIGKILL)
        await until(lambda: cluster.pid("router-1") != before)
        for _ in range(8):
            assert await _answers(cluster.url)
        await until(lambda: cluster.log("router-1").read_text().count("kvrelay ready:") >= 2)
        assert await _answers(cluster.url)
        assert not supervising.done()
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


@pytest.mark.slow
async def test_a_stopped_replica_is_replaced(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = Config(
        router=RouterConfig(port=0, control_port=0, replicas=2), mock=MockConfig(enabled=True, time_scale=0.05)
    )
    async with LocalCluster(config, run_dir=tmp_path_factory.mktemp("run"), model=tiny) as cluster:
        supervising = asyncio.create_task(cluster.wait())
        before = cluster.pid("router-1")
        os.kill(before, signal.SIGSTOP)
        await until(lambda: cluster.pid("router-1") != before)
        await until(lambda: cluster.log("router-1").read_text().count("kvrelay ready:") >= 2)
        for _ in range(8):
            assert await _answers(cluster.url)
        assert not supervising.done()
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


@pytest.mark.slow
async def test_the_process_of_all_workers_and_stores_is_started_again_when_it_is_killed(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Config(
        router=RouterConfig(port=0, control_port=0),
        cluster=ClusterConfig(prefill=2, decode=2, stores=2),
        mock=MockConfig(enabled=True, time_scale=0.05),
    )
    async with LocalCluster(config, run_dir=tmp_path_factory.mktemp("run"), model=tiny) as cluster:
        supervising = asyncio.create_task(cluster.wait())
        for _ in range(2):
            assert await _answers(cluster.url)
            before = cluster.pid("mock")
            os.kill(before, signal.SIGKILL)
            await until(lambda before=before: cluster.pid("mock") != before)  # type: ignore[misc]
            async with asyncio.timeout(PATIENCE_S):
                while not await _answers(cluster.url):  # 503 with Retry-After until the workers are back
                    await asyncio.sleep(0.05)
        assert not supervising.done()
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


async def _answers(url: str) -> bool:
    """Over a new connection: whichever router takes it."""
    body = {"model": "tiny", "prompt": prompt(0), "max_tokens": 3, "ignore_eos": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
        answer = json.loads(await response.read())
        return response.status == 200 and bool(answer["usage"]["completion_tokens"] == 3)
