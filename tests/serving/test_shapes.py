"""Two P feed one D, one P feeds two D; the KV crosses from store to store either way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from benchmarks.breaking.stopped import stopped
from kvrelay.store.client import StoreClient
from kvrelay.types import Role
from tests.patience import PATIENCE_S
from tests.serving.conftest import Baseline
from tests.serving.probe import Probe, prompt_tokens
from tests.serving.test_damage import restart_stores
from tests.serving.test_equality import ask, written
from tests.serving.tiny import PAGE_TOKENS, completion, ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ROUNDS = 3
AT_ONCE = 6
HITS, PREFIX_TOKENS = 4, 1024
EVENTS_S = 3.0
"""Longest wait for the router to hear of what a worker computed: a full cache gets no more pages."""
LONG_TOKENS = 2000
ATTEMPTS = 5
FIRST_PAGES = 8
"""Of one step."""


async def test_every_worker_has_its_part_and_every_answer_is_right(shaped: Probe, tiny_baseline: Baseline) -> None:
    before = {worker.name: await prompt_tokens(shaped.http, worker.url) for worker in shaped.cluster.workers}
    rng = random.Random(21)
    rounds = [[completion(ids(rng, rng.randrange(70, 240)), 6) for _ in range(AT_ONCE)] for _ in range(ROUNDS)]
    for bodies in rounds:
        expected = [await tiny_baseline.ask("/v1/completions", body) for body in bodies]
        for _again in range(2):  # the second time, all of it is in stores and in the engines' own caches
            answers = await asyncio.gather(*(ask(shaped, "/v1/completions", body) for body in bodies))
            assert [written(answer) for answer in answers] == [written(answer) for answer in expected]
    await check_parts(shaped, before)
    await shaped.assert_at_rest()


async def check_parts(probe: Probe, before: dict[str, dict[str, float]]) -> None:
    """Each P computed prompts, and no D did but for their last tokens; what D's had came over the wire."""
    for worker in probe.cluster.workers:
        after = await prompt_tokens(probe.http, worker.url)
        tokens = {source: count - before[worker.name].get(source, 0.0) for source, count in after.items()}
        if worker.role is Role.PREFILL:
            assert tokens["local_compute"] > 200, worker.name
        else:
            assert tokens["external_kv_transfer"] > 200, worker.name
            assert tokens["local_compute"] <= 2 * ROUNDS * AT_ONCE, worker.name
    assert probe.counts()["pages_received"] > 0


async def test_one_conversation_goes_on_wherever_its_next_turn_is_computed(
    shaped: Probe, tiny_baseline: Baseline
) -> None:
    history = ids(random.Random(22), 40)
    for turn in range(3):
        body = completion(history, max_tokens=35)
        answer: Any = await ask(shaped, "/v1/completions", body)
        assert written(answer) == written(await tiny_baseline.ask("/v1/completions", body)), turn
        history = history + answer["choices"][0]["token_ids"] + ids(random.Random(30 + turn), 10)
    await shaped.assert_at_rest()


async def test_prompts_of_one_request_are_computed_by_all_p_and_answered_by_one_d(
    shaped: Probe, tiny_baseline: Baseline
) -> None:
    rng = random.Random(23)
    body = completion([], 5) | {"prompt": [ids(rng, tokens) for tokens in (31, 32, 33, 150)]}
    answer = await ask(shaped, "/v1/completions", body)
    assert written(answer) == written(await tiny_baseline.ask("/v1/completions", body))
    await shaped.assert_at_rest()


async def test_a_prefill_worker_that_stops_in_its_push_costs_only_time(shaped: Probe, tiny_baseline: Baseline) -> None:
    """The cluster is idle but for this; another P goes on, or D where there is none."""
    victim = shaped.prefillers[0].name
    for attempt in range(ATTEMPTS):
        body = completion(ids(random.Random(f"stopped {attempt}"), LONG_TOKENS), 8)
        expected = await tiny_baseline.ask("/v1/completions", body)
        async with contextlib.AsyncExitStack() as until_answered:
            asking, saved = await stopped_in_its_push(shaped, victim, body, until_answered)
            assert written(await asking) == written(expected)
        await shaped.until_ready(victim)
        await shaped.assert_at_rest()
        if saved < LONG_TOKENS // PAGE_TOKENS:
            return
    pytest.fail("P was through before it was stopped, each time")


async def stopped_in_its_push(
    shaped: Probe, victim: str, body: dict[str, Any], until: contextlib.AsyncExitStack
) -> tuple[asyncio.Task[dict[str, Any]], int]:
    """``victim`` is stopped once it has filled some pages of ``body``, which is asked; how many it has filled then."""
    others = [worker.name for worker in shaped.prefillers if worker.name != victim]
    async with shaped.without(*others):
        with shaped.store("store-0") as store:
            before = await pages_put(store)
            asking = asyncio.create_task(ask(shaped, "/v1/completions", body))
            async with asyncio.timeout(PATIENCE_S):
                while await pages_put(store) < before + FIRST_PAGES:
                    await asyncio.sleep(0.005)
            until.enter_context(stopped(shaped.cluster.pid(victim)))
            return asking, await pages_put(store) - before


async def pages_put(store: StoreClient) -> int:
    return (await asyncio.to_thread(store.describe))["pages_put"]


async def test_a_hit_goes_to_the_prefill_worker_that_alone_has_it(shaped: Probe) -> None:
    """Both share a store, which serves either; after its death only the cache of one has the prefix."""
    if len(shaped.prefillers) == 1:
        pytest.skip("there is no other to go to")
    rng = random.Random(25)
    for _ in range(HITS):
        prefix, before = ids(rng, PREFIX_TOKENS), await pages_told(shaped)
        holder = await computed_by(shaped, prefix + ids(rng, 40))
        await until_told(shaped, holder, before[holder] + PREFIX_TOKENS // PAGE_TOKENS)
        await restart_stores(shaped)
        assert await computed_by(shaped, prefix + ids(rng, 40)) == holder
    await shaped.assert_at_rest()


async def computed_by(probe: Probe, prompt: list[int]) -> str:
    """The prefill worker to which a request went."""
    async with probe.http.post(f"{probe.cluster.url}/v1/completions", json=completion(prompt, 4)) as response:
        assert response.status == 200, await response.text()
        name = response.headers["x-request-id"]
    return str((await probe.report(name))["prefill_worker"])


async def pages_told(probe: Probe) -> dict[str, float]:
    """How many pages the router has heard of, by prefill worker."""
    values = await probe.metrics(probe.cluster.url)
    return {each.name: values[f"kvrelay_worker_pages{{worker={each.name}}}"] for each in probe.prefillers}


async def until_told(probe: Probe, worker: str, pages: float) -> None:
    """Return once the router has heard of so many pages of ``worker``, or ``EVENTS_S`` have passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EVENTS_S):
            while (await pages_told(probe))[worker] < pages:
                await asyncio.sleep(0.02)
