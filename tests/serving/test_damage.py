"""A page that is not whole, not current or not there is never used: the engine computes, and the text is equal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import Role
from tests.serving.conftest import CHUNK, Baseline
from tests.serving.probe import Probe
from tests.serving.test_equality import PAGE, ask, completion, written
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def ask_worker(probe: Probe, role: Role, body: dict[str, Any]) -> Any:
    """Past the router, at one engine: what its own store holds decides what it loads."""
    url = probe.worker(role).url + "/v1/completions"
    async with probe.http.post(url, json=body, headers=probe.engine_headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def store_of(probe: Probe, role: Role) -> str:
    return list(probe.cluster.stores)[-1 if role is Role.DECODE else 0]


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_flipped_bit_in_the_arena_is_computed_anew(
    probe: Probe, baseline: Baseline, model: Path, role: Role
) -> None:
    # Shorter than a block: no engine has it in its own cache, so each request loads it from the arena.
    ids = token_ids(model, 100, number=2000 + len(role))
    body = completion(ids)
    expected = written(await baseline.ask("/v1/completions", body))
    assert written(await ask(probe, "/v1/completions", body)) == expected

    names = probe.page_names(ids)
    with probe.store(store_of(probe, role)) as store:
        assert store.exists(names) == [True] * 4
        held = store.acquire("flip", names, 30.0).result(5).pages[1]
        assert held is not None
        assert store.arena is not None
        store.arena.data[held.slot.slot, 5 * store.arena.format.segment_bytes + 11] ^= 0x10
        store.release("flip")
        before = store.describe()
        assert written(await ask_worker(probe, role, body)) == expected
        after = store.describe()
        assert after["load_bad_checksum"] - before.get("load_bad_checksum", 0) == 1
    await probe.wait_for_pages(store_of(probe, role), names)
    await wait_for_metric(probe, "kvrelay_store_count{count=load_bad_checksum}")

    tokens_before = await probe.prompt_tokens(role)
    assert written(await ask_worker(probe, role, body)) == expected
    tokens_after = await probe.prompt_tokens(role)
    assert tokens_after["local_compute"] - tokens_before["local_compute"] <= 1, "the page was saved again, and is used"
    await probe.assert_at_rest()


async def wait_for_metric(probe: Probe, name: str) -> None:
    """Stores tell their routers what they counted with their heartbeats."""
    for _attempt in range(30):
        if (await probe.metrics(probe.cluster.url)).get(name, 0) > 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} is not counted")


async def restart_stores(probe: Probe) -> None:
    for name in probe.cluster.stores:
        await probe.cluster.kill(name)
        await probe.cluster.restart(name)
    await wait_attached(probe)


async def wait_attached(probe: Probe) -> None:
    """Engines come back to a restarted store by themselves: the scheduler half and the worker half of each."""
    looking = len(probe.cluster.stores)
    for _attempt in range(100):
        if probe.counts()["owner_links"] - looking == 2 * len(probe.cluster.workers):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not all engines attached again: {probe.counts()}")


async def test_a_warm_prefill_worker_hands_over_everything_after_the_stores_were_emptied(
    probe: Probe, baseline: Baseline, model: Path
) -> None:
    ids = token_ids(model, 300, number=2100)
    body = completion(ids)
    expected = written(await baseline.ask("/v1/completions", body))
    assert written(await ask(probe, "/v1/completions", body)) == expected

    await restart_stores(probe)
    before = await probe.prompt_tokens(Role.PREFILL)
    assert written(await ask(probe, "/v1/completions", body)) == expected
    after = await probe.prompt_tokens(Role.PREFILL)
    assert after["local_cache_hit"] - before["local_cache_hit"] == 256, "P was warm"
    with probe.store(store_of(probe, Role.DECODE)) as store:
        assert store.exists(probe.page_names(ids)) == [True] * 10, "not only the tail was handed over"
    await probe.assert_at_rest()


async def test_a_store_that_dies_in_the_middle_of_a_hand_off_costs_only_time(
    probe: Probe, baseline: Baseline, model: Path
) -> None:
    body = completion(token_ids(model, 4 * CHUNK + 100, number=2200))
    expected = written(await baseline.ask("/v1/completions", body))
    answer = asyncio.create_task(ask(probe, "/v1/completions", body))
    victim = store_of(probe, Role.PREFILL)
    others = probe.processes_but(victim)
    await wait_for_progress(probe, victim)
    await probe.cluster.kill(victim)
    assert written(await answer) == expected
    await probe.cluster.restart(victim)
    await wait_attached(probe)
    before = await probe.prompt_tokens(Role.DECODE)
    again = completion(token_ids(model, 90, number=2201))
    assert written(await ask(probe, "/v1/completions", again)) == written(await baseline.ask("/v1/completions", again))
    after = await probe.prompt_tokens(Role.DECODE)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= 90 - 1, "the new store is in use"
    assert probe.processes_but(victim) == others
    await probe.assert_at_rest()


async def wait_for_progress(probe: Probe, store: str) -> None:
    """Some pages of a new hand-off are in, others are not."""
    with probe.store(store) as client:
        start = client.describe()["pages_put"]
        for _attempt in range(400):
            if client.describe()["pages_put"] >= start + CHUNK // PAGE:
                return
            await asyncio.sleep(0.02)
    raise AssertionError("no page arrived")


async def test_a_killed_prefill_worker_costs_only_time(probe: Probe, baseline: Baseline, model: Path) -> None:
    body = completion(token_ids(model, 4 * CHUNK + 60, number=2300))
    expected = written(await baseline.ask("/v1/completions", body))
    answer = asyncio.create_task(ask(probe, "/v1/completions", body))
    await wait_for_progress(probe, store_of(probe, Role.PREFILL))
    victim = probe.worker(Role.PREFILL).name
    others = probe.processes_but(victim)
    await probe.cluster.kill(victim)
    assert written(await answer) == expected
    await probe.cluster.restart(victim)
    again = completion(token_ids(model, 90, number=2301))
    right = await baseline.ask("/v1/completions", again)
    assert written(await ask(probe, "/v1/completions", again)) == written(right)
    assert probe.processes_but(victim) == others, "D and its store ran on"
    await probe.assert_at_rest()
