"""A router that dies takes its own open connections with it, and nothing else."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import BEGUN_TOKENS, Answer, bodies, equal_baseline, read

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_its_streams_end_and_engines_forget_them_and_the_next_router_is_right(
    probe: Breakable, tiny_baseline: Baseline
) -> None:
    others = probe.processes_but("router")
    asked, answers = bodies(400, 2), [Answer(), Answer()]
    reading = [asyncio.create_task(read(probe, *each)) for each in zip(asked, answers, strict=True)]
    while min(answer.tokens for answer in answers) < BEGUN_TOKENS:
        assert not any(task.done() for task in reading)
        await asyncio.sleep(0.002)
    await probe.cluster.kill("router")
    for task in reading:
        with pytest.raises(aiohttp.ClientError):
            await task
    assert "data: [DONE]" not in [answer.last for answer in answers]
    await probe.cluster.restart("router")
    await equal_baseline(probe, tiny_baseline, asked)
    assert probe.processes_but("router") == others
    await probe.assert_at_rest()
