"""The pages of a prompt lie with P and with D after a hand-off. Whoever loses its store, no request fails."""

from __future__ import annotations

import asyncio
import itertools
import random
from functools import partial

import pytest

from tests.patience import PATIENCE_S
from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.whole import whole_again
from tests.serving.probe import prompt_tokens
from tests.serving.test_equality import ask, written
from tests.serving.tiny import BLOCK_TOKENS, at_most, completion, ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPTS = 24
CLIENTS = 4
AWAY_S = 1.5
SHORT = BLOCK_TOKENS - 1
"""No engine keeps so few tokens in its own cache: each request reads its page from a store, or computes it."""


async def loaded_tokens(probe: Breakable) -> float:
    return sum([(await prompt_tokens(probe.http, worker.url))["external_kv_transfer"] for worker in probe.decoders])


@pytest.mark.parametrize("victim", ["store-0", "store-1"])
async def test_a_store_that_dies_while_its_pages_are_read_fails_no_request(
    probe: Breakable, tiny_baseline: Baseline, victim: str
) -> None:
    rng = random.Random(victim)
    asked = [completion(ids(rng, SHORT), max_tokens=6) for _ in range(PROMPTS)]
    expected = [written(await tiny_baseline.ask("/v1/completions", body)) for body in asked]
    questions = itertools.cycle(zip(asked, expected, strict=True))
    over = asyncio.Event()

    async def client() -> int:
        answers = 0
        while not over.is_set():
            body, right = next(questions)
            assert written(await ask(probe, "/v1/completions", body)) == right
            answers += 1
        return answers

    await at_most(CLIENTS, (partial(ask, probe, "/v1/completions", body) for body in asked))
    before = await loaded_tokens(probe)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(CLIENTS)]
        async with asyncio.timeout(PATIENCE_S):
            while await loaded_tokens(probe) <= before:  # until pages are read
                await asyncio.sleep(0.1)
        await probe.cluster.kill(victim)
        await asyncio.sleep(AWAY_S)
        await probe.cluster.restart(victim)
        over.set()
    assert all(task.result() > 0 for task in clients)
    await whole_again(probe, seed=500 + int(victim[-1]))
    await probe.assert_at_rest()
