"""Mock stores that die and come back empty: requests go on, are right, and nobody believes in pages that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrelay.config import RouterConfig
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.fleet.index import store_key
from kvrelay.fleet.ways import BREAKS_TO_OPEN
from kvrelay.protocol.engine import engine_key
from tests.deploy.mock.test_mock_cluster import PREFILLS, Mocks, idle, mocked, prompt
from tests.patience import PATIENCE_S, until
from tests.router.cluster import KEY

P_STORE, D_STORE = "store-0", "store-1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


@pytest.fixture
async def mocks(tiny: Path) -> AsyncIterator[Mocks]:
    """A silent transfer is waited for longer than a test lasts: who does not hear of a death at once hangs."""
    router = RouterConfig(port=0, control_port=0, transfer_wait_s=60, local_prefill="never")
    async with mocked(tiny, router) as mocks:
        yield mocks
        mocks.suffer(*mocks.node.workers)
        await mocks.cluster.at_rest()
        await until(lambda: all(idle(worker) for worker in mocks.node.workers.values()))


def kill(mocks: Mocks, store: str) -> None:
    mocks.node.site.members[store].suffer(Faults(dead=True))


def revive(mocks: Mocks, store: str) -> None:
    mocks.node.site.members[store].suffer(Faults())


async def away(mocks: Mocks, store: str, is_away: bool = True) -> None:
    await until(lambda: store not in ready(mocks) if is_away else store in ready(mocks))


def ready(mocks: Mocks) -> set[str]:
    brain = mocks.cluster.router.brain
    return {info.name for info in brain.fleet.stores.usable(asyncio.get_running_loop().time())}


@pytest.mark.parametrize("store", [P_STORE, D_STORE])
async def test_a_dead_store_degrades_its_node_and_heals_when_it_returns(mocks: Mocks, store: str) -> None:
    await mocks.ask(prompt(0))
    kill(mocks, store)
    await away(mocks, store)
    timeline = await mocks.ask(prompt(1))
    assert (timeline["path"], timeline["local_reason"]) == ("local", "no_pair")
    async with mocks.cluster.http.get("/health") as response:
        health = await response.json()
    assert (response.status, health["status"]) == (200, "degraded")
    assert f"store '{store}'" in health["why"]
    revive(mocks, store)
    await away(mocks, store, is_away=False)
    timeline = await mocks.ask(prompt(2))
    assert (timeline["path"], "loaded" in timeline["events"]) == ("remote_prefill", True)
    assert (await mocks.ask(prompt(0)))["path"] == "remote_prefill"


@pytest.mark.parametrize("store", [P_STORE, D_STORE])
async def test_a_store_that_dies_in_the_middle_of_a_hand_off_costs_only_time(mocks: Mocks, store: str) -> None:
    mocks.suffer(*PREFILLS, slow=60.0)
    asking = asyncio.create_task(mocks.ask(prompt(0)))
    engines = [mocks.worker(name) for name in PREFILLS]
    await until(lambda: any(worker.life and worker.life.engine.scheduler.running for worker in engines))
    kill(mocks, store)
    await away(mocks, store)
    mocks.suffer(*PREFILLS)
    assert "finished" in (await asking)["events"]
    revive(mocks, store)
    await away(mocks, store, is_away=False)
    assert "loaded" in (await mocks.ask(prompt(1)))["events"]


async def test_a_store_is_missed_as_soon_as_its_link_breaks(mocks: Mocks) -> None:
    mocks.cluster.router.brain.fleet.stores._dead_after_s = 60.0
    kill(mocks, D_STORE)
    await away(mocks, D_STORE)


async def test_a_restarted_empty_store_is_not_believed_to_hold_what_it_held(mocks: Mocks) -> None:
    for number in range(3):
        await mocks.ask(prompt(number))
    index = mocks.cluster.router.brain.index
    await until(lambda: index.count(store_key(D_STORE)) >= 3 * 22)
    store = mocks.node.site.members[D_STORE].store
    before = store.info.incarnation
    kill(mocks, D_STORE)
    await away(mocks, D_STORE)
    revive(mocks, D_STORE)
    await away(mocks, D_STORE, is_away=False)
    assert store.info.incarnation != before
    timeline = await mocks.ask(prompt(0))  # at once: what a dead incarnation held must count for nothing, known or not
    assert timeline["transfers"][0]["pages"] == 22, "what the old one held travels again"
    await until(lambda: 22 <= index.count(store_key(D_STORE)) < 2 * 22)
    await until(lambda: index.count(store_key(D_STORE)) >= 22)


async def test_stores_take_their_faults_over_the_control_route(mocks: Mocks) -> None:
    keyed = {"authorization": f"Bearer {engine_key(KEY)}"}
    url = f"{mocks.node.control_url}/workers"
    async with aiohttp.ClientSession(headers=keyed) as http:
        for body, status in ((b'{"hang":true}', 400), (b'{"dead":true}', 200)):
            async with http.put(f"{url}/{D_STORE}/faults", data=body) as response:
                assert response.status == status
        await away(mocks, D_STORE)
        async with http.get(url) as response:
            assert {each["name"]: each["role"] for each in await response.json()}[D_STORE] == "store"
        async with http.put(f"{url}/{D_STORE}/faults", data=b"{}") as response:
            assert response.status == 200
    await away(mocks, D_STORE, is_away=False)


async def test_stores_that_do_not_reach_each_other_cost_a_few_hand_offs_and_not_one_for_every_request(
    mocks: Mocks,
) -> None:
    mocks.node.site.members[D_STORE].suffer(Faults(apart=True))
    failed, local = 0, 0
    for number in range(BREAKS_TO_OPEN + 5):
        timeline = await mocks.ask(prompt(number))
        failed += timeline["path"] == "remote_prefill"
        local += timeline.get("local_reason") == "no_pair"
    assert failed >= BREAKS_TO_OPEN
    assert local > 0
    health = await said(mocks)
    assert health["status"] == "degraded"
    assert f"no store answers at {D_STORE}" in health["broken_ways"][0]["why"]
    assert {row["name"]: row["cut_off"] for row in health["workers"]} == dict.fromkeys(mocks.node.workers, True)
    async with mocks.cluster.http.get("/metrics") as response:
        assert f'kvrelay_way_broken{{peer="{D_STORE}",store="{P_STORE}"}} 1.0' in await response.text()
    revive(mocks, D_STORE)
    async with asyncio.timeout(PATIENCE_S):
        while (await said(mocks))["status"] != "ok":  # until a probe gets through
            await mocks.ask(prompt(50))
    assert (await mocks.ask(prompt(51)))["path"] == "remote_prefill"


async def said(mocks: Mocks) -> dict[str, Any]:
    """The router's health."""
    async with mocks.cluster.http.get("/health") as response:
        health: dict[str, Any] = await response.json()
    return health
