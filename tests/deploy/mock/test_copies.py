"""Second copies of running answers' pages, on three nodes of mock workers: what they save, what their loss costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.mock.node import MockNode
from kvrelay.deploy.mock.roster import WorkerPlan
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.fleet.index import store_key
from kvrelay.types import Role
from tests.deploy.mock.test_mock_cluster import Mocks, idle, prompt
from tests.patience import until
from tests.router.cluster import KEY, Cluster

CONFIG = Config(
    mock=MockConfig(time_scale=6.0, kv_tokens=8192),
    worker=WorkerConfig(load_wait_s=3.0),
    cluster=ClusterConfig(heartbeat_s=0.1),
)
PLANS = (
    WorkerPlan(name="p", role=Role.PREFILL, store=0),
    WorkerPlan(name="d1", role=Role.DECODE, store=1),
    WorkerPlan(name="d2", role=Role.DECODE, store=2),
)
STORES = ("store-0", "store-1", "store-2")
NEAR = {"d1": "store-1", "d2": "store-2"}
TOKENS = 400


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    router = RouterConfig(port=0, control_port=0, local_prefill="never", replicate_share=0.5)
    async with Cluster(tiny, router_config=router) as cluster:
        site = Site(CONFIG, tiny, cluster.tokens, stores=STORES, routers=(cluster.control,), key=KEY)
        node, ready = MockNode(site, PLANS), asyncio.Event()
        running = asyncio.create_task(node.run(lambda _: ready.set()))
        await ready.wait()
        mocks = Mocks(cluster, node)
        await mocks.ready()
        yield mocks
        mocks.suffer(*node.workers)
        await cluster.at_rest()
        await until(lambda: all(idle(worker) for worker in node.workers.values()))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def copied(mocks: Mocks) -> tuple[asyncio.Task[tuple[list[int], bytes]], str]:
    """A stream of which generated pages were copied, and the worker that writes it."""
    stream = asyncio.create_task(mocks.stream(prompt(0), TOKENS))
    copies = mocks.cluster.router.brain.copies.counts
    await until(lambda: copies.made > 0)
    (worker,) = [name for name in NEAR if mocks.cluster.router.brain.loads.sequences[name]]
    return stream, worker


def kill(mocks: Mocks, worker: str | None, store: str) -> None:
    mocks.node.site.members[store].suffer(Faults(dead=True))
    if worker is not None:
        mocks.suffer(worker, dead=True)


@pytest.mark.slow
async def test_an_answer_goes_on_from_its_copies_when_the_node_dies(mocks: Mocks) -> None:
    stream, worker = await copied(mocks)
    index = mocks.cluster.router.brain.index
    elsewhere = [store for store in STORES if store != NEAR[worker]]
    # More than the prompt: the store tells of what it got a moment after the copy has ended.
    await until(lambda: max(index.count(store_key(store)) for store in elsewhere) > 22)
    mocks.suffer("p", dead=True)  # its engine has the prompt, too: that would be the second best
    await until(lambda: not mocks.cluster.is_ready("p"))
    kill(mocks, worker, NEAR[worker])
    assert await stream == (mocks.answer(prompt(0), TOKENS), b"data: [DONE]")
    (timeline,) = mocks.cluster.router.brain.ledger._timelines.values()
    (lost,) = timeline.resumptions
    assert lost.cached_tokens > 700, "nobody computed the prompt again, nor what was written and copied"


@pytest.mark.slow
async def test_the_death_of_the_store_with_the_copies_fails_no_read(mocks: Mocks) -> None:
    stream, worker = await copied(mocks)
    holders = [store for store in ("store-0", "store-1", "store-2") if store != NEAR[worker]]
    for store in holders:
        kill(mocks, None, store)
    await until(lambda: mocks.cluster.router.brain.loads.sequences[worker] == 1)
    mocks.suffer(worker, dead=True)
    assert await stream == (mocks.answer(prompt(0), TOKENS), b"data: [DONE]")


@pytest.mark.slow
async def test_what_another_node_has_already_is_not_copied(mocks: Mocks) -> None:
    copies = mocks.cluster.router.brain.copies
    await mocks.stream(prompt(0), 90)
    assert copies.counts.begun == 0, "P's node has the prompt, and two pages of an answer are not worth a message"
