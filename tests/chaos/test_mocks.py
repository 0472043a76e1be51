"""A router and mock workers, broken at random from a seed while clients ask: no answer is wrong, none hangs, nothing is
held at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.chaos.run import ChaosPlan, wreak
from kvrelay.deploy.chaos.script import OF_CLIENTS
from kvrelay.deploy.chaos.victims import OF_STORES, OF_WORKERS, MockVictims
from kvrelay.deploy.mock.node import MockNode
from kvrelay.deploy.mock.roster import mock_names
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.protocol.engine import engine_key
from tests.deploy.mock.test_mock_cluster import idle
from tests.patience import until
from tests.router.cluster import KEY, Cluster

CONFIG = Config(
    mock=MockConfig(time_scale=0.5, kv_tokens=16384),
    worker=WorkerConfig(load_wait_s=0.5),
    cluster=ClusterConfig(stores=2, heartbeat_s=0.1),
)
PLAN = ChaosPlan(events=90, streams=16, every_s=0.2, lasts_s=(0.2, 1.2), words=(20, 600), tokens=(8, 60), hung_s=60.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def site(tiny: Path) -> AsyncIterator[tuple[Cluster, MockNode]]:
    async with Cluster(tiny, router_config=RouterConfig(port=0, control_port=0)) as cluster:
        names = mock_names(4, 4, 0, stores=2)
        site = Site(CONFIG, tiny, cluster.tokens, stores=names.stores, routers=(cluster.control,), key=KEY)
        node, ready = MockNode(site, names.workers), asyncio.Event()
        running = asyncio.create_task(node.run(lambda _: ready.set()))
        await ready.wait()
        await until(lambda: all(cluster.is_ready(name) for name in node.workers))
        yield cluster, node
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
async def test_whatever_dies_hangs_or_goes_away_no_answer_is_wrong(site: tuple[Cluster, MockNode], seed: int) -> None:
    cluster, node = site
    plan = ChaosPlan(**{name: getattr(PLAN, name) for name in ChaosPlan.__struct_fields__} | {"seed": seed})
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        victims = MockVictims(http, node.control_url, engine_key(KEY))
        outcome = await wreak(http, cluster.url, victims, plan)
    assert outcome.failures == [], f"with seed {seed}"
    assert outcome.held == [], f"with seed {seed}"
    assert {label.split()[0] for label in outcome.deeds} == {*OF_STORES, *OF_WORKERS, *OF_CLIENTS}
    assert outcome.verdicts["right"] > plan.streams
    # One worker of each role is broken at a time, and no router is. So nobody's connection breaks, and all are answered
    # but for one or two that meet a moment in which those that were broken before are not ready again yet.
    assert {"wrong", "hung", "cut"}.isdisjoint(outcome.verdicts), outcome.causes
    assert sum(outcome.causes.values()) <= 2, outcome.causes
    await cluster.at_rest()
    await until(lambda: all(idle(worker) for worker in node.workers.values()))
