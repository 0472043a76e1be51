"""A thousand requests through memory that holds a few dozen: every block and every slot is used again and again.

Slow corruption shows here or nowhere: each answer is compared with an unsplit engine's.
"""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvrelay.deploy.local import LocalCluster
from kvrelay.types import Role
from tests.serving.conftest import Baseline
from tests.serving.probe import Probe
from tests.serving.test_equality import ask, written
from tests.serving.tiny import BLOCK_TOKENS, at_most, completion, config, ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

REQUESTS = 1000
PROMPTS = 250
"""Each is asked four times, at random distances: its pages are there, half there, or long overwritten."""
AT_ONCE = 8
KV_BLOCKS = 40
"""Eight of the longest requests need 56: they do not fit beside each other."""
ARENA_PAGES = 96


def bodies() -> list[dict[str, Any]]:
    """Prompts of 20 to 200 tokens, most of which share a beginning with others."""
    rng = random.Random(11)
    stems = [ids(rng, 160) for _ in range(12)]
    made = []
    for _ in range(PROMPTS):
        shared, own = rng.randrange(0, 161), rng.randrange(20, 41)
        made.append(completion(rng.choice(stems)[:shared] + ids(rng, own), max_tokens=rng.randrange(4, 9)))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small(tiny_model: Path, http: aiohttp.ClientSession) -> AsyncIterator[Probe]:
    wanted = config(arena_pages=ARENA_PAGES, kv_blocks=KV_BLOCKS)
    async with LocalCluster(wanted, model=tiny_model) as cluster:
        yield Probe(cluster, http)


async def test_a_thousand_requests_in_little_memory_are_all_answered_right(
    tiny_baseline: Baseline, small: Probe
) -> None:
    asked = bodies()
    route = "/v1/completions"
    expected = await at_most(AT_ONCE, (functools.partial(tiny_baseline.ask, route, body) for body in asked))
    order = [number % PROMPTS for number in range(REQUESTS)]
    random.Random(12).shuffle(order)
    answers = await at_most(AT_ONCE, (functools.partial(ask, small, route, asked[number]) for number in order))

    wrong = [
        number for number, answer in zip(order, answers, strict=True) if written(answer) != written(expected[number])
    ]
    assert wrong == []
    assert len(answers) == REQUESTS
    await small.assert_at_rest()
    await check_that_memory_was_used_again(small)


async def check_that_memory_was_used_again(probe: Probe) -> None:
    """Or the soak proved nothing."""
    counts = probe.counts()
    assert counts["pages_evicted"] > 10 * ARENA_PAGES
    assert counts["pages_received"] > 10 * ARENA_PAGES
    tokens = await probe.prompt_tokens(Role.DECODE)
    assert tokens["external_kv_transfer"] > 10 * KV_BLOCKS * BLOCK_TOKENS
