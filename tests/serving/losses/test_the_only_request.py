"""On an idle cluster one request loses a worker, and nobody wakes whoever waits: its answer is right all the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.serving import tiny
from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import Answer, read
from tests.serving.losses.whole import whole_again
from tests.serving.probe import BACK_S

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PREFILL = "prefill-0"


@contextlib.asynccontextmanager
async def asked(probe: Breakable, baseline: Baseline, seed: str) -> AsyncIterator[None]:
    """A request begins with the block, and is answered right at its end."""
    body: dict[str, Any] = tiny.completion(tiny.ids(random.Random(seed), 150), 20)
    right = await baseline.ask("/v1/completions", body)
    asking = asyncio.create_task(read(probe, body, Answer()))
    yield
    (await asking).assert_whole(right)


async def until_sent(probe: Breakable, name: str) -> None:
    """Return once the router counts on ``name`` for a prompt."""
    async with asyncio.timeout(BACK_S):
        while not (await probe.metrics(probe.cluster.url))[f"kvrelay_prefill_queued_tokens{{worker={name}}}"]:
            await asyncio.sleep(0.02)


async def test_it_outlives_the_death_of_d_in_mid_transfer_and_that_of_p_before_its_push(
    probe: Breakable, tiny_baseline: Baseline
) -> None:
    """Both are dead before they are started again, at once, on the ports that they had: P's prompt is computed by D."""
    async with asked(probe, tiny_baseline, "D dies"):
        with probe.wires.between_stores():
            victim = await probe.until_waiting(0)
            await probe.cluster.kill(victim)
    others = probe.processes_but(victim, PREFILL)
    with probe.stopped(PREFILL):
        async with asked(probe, tiny_baseline, "P dies"):
            await until_sent(probe, PREFILL)
            await probe.cluster.kill(PREFILL)
    await asyncio.gather(*(probe.cluster.restart(name) for name in (victim, PREFILL)))
    await whole_again(probe, seed=300)
    assert probe.processes_but(victim, PREFILL) == others
    await probe.assert_at_rest()


async def test_it_outlives_a_d_that_stops_in_mid_transfer(probe: Breakable, tiny_baseline: Baseline) -> None:
    with contextlib.ExitStack() as until_answered:
        async with asked(probe, tiny_baseline, "D stops"):
            with probe.wires.between_stores():
                victim = await probe.until_waiting(0)
                until_answered.enter_context(probe.stopped(victim))
    await probe.until_ready(victim)
    await probe.assert_at_rest()
