"""A client that goes away takes everything of its request with it, wherever the request is."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvrelay.types import Role
from tests.serving.conftest import CHUNK, Baseline
from tests.serving.probe import Probe
from tests.serving.test_equality import ask, completion, written
from tests.serving.texts import token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

STEP_S = 4.0
"""An engine acts on an abort after its present step; a chunk takes about two seconds here."""


async def forgotten(probe: Probe, role: Role, within_s: float = STEP_S) -> None:
    """Return once the worker of ``role`` does nothing any more for a client that has just gone."""
    await until(lambda: idle(probe, role), within_s=within_s)


async def running(probe: Probe, role: Role) -> float:
    values = await probe.metrics(probe.worker(role).url)
    return values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]


async def until(condition: Any, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "did not happen"
        await asyncio.sleep(0.02)


async def go_away(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stream", [False, True])
async def test_gone_during_prefill(probe: Probe, model: Path, stream: bool) -> None:
    body = completion(token_ids(model, 5 * CHUNK, number=3000 + stream), stream=stream)
    task = asyncio.create_task(ask(probe, "/v1/completions", body))
    await until(lambda: busy(probe, Role.PREFILL))
    await go_away(task)
    await forgotten(probe, Role.PREFILL)
    assert await idle(probe, Role.DECODE)
    await probe.assert_at_rest()


async def busy(probe: Probe, role: Role) -> bool:
    return await running(probe, role) > 0


async def idle(probe: Probe, role: Role) -> bool:
    return await running(probe, role) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_gone_while_decode_waits_for_the_last_chunk(probe: Probe, model: Path, stream: bool) -> None:
    body = completion(token_ids(model, 3 * CHUNK, number=3010 + stream), stream=stream)
    task = asyncio.create_task(ask(probe, "/v1/completions", body))
    await until(lambda: busy(probe, Role.DECODE))
    await go_away(task)
    await forgotten(probe, Role.DECODE)
    await probe.assert_at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_gone_during_decode(probe: Probe, model: Path, stream: bool) -> None:
    body = completion(token_ids(model, 40, number=3020 + stream), max_tokens=1500, ignore_eos=True, stream=stream)
    task = asyncio.create_task(ask(probe, "/v1/completions", body))
    await until(lambda: busy(probe, Role.DECODE))
    await asyncio.sleep(1.0)
    await go_away(task)
    await forgotten(probe, Role.DECODE, within_s=1.0 + STEP_S)
    await probe.assert_at_rest()


async def test_of_a_hundred_requests_thirty_go_away_and_the_others_are_right(
    probe: Probe, baseline: Baseline, model: Path
) -> None:
    rng = random.Random(5)
    bodies = [completion(token_ids(model, 20 + 13 * (i % 10), number=3100 + i % 10), max_tokens=6) for i in range(100)]
    expected = [written(await baseline.ask("/v1/completions", body)) for body in bodies]
    gone = set(rng.sample(range(100), 30))
    gate = asyncio.Semaphore(10)

    async def client(number: int) -> Any:
        async with gate:
            if number not in gone:
                return await ask(probe, "/v1/completions", bodies[number])
            try:
                async with asyncio.timeout(rng.uniform(0.0, 0.8)):
                    await ask(probe, "/v1/completions", bodies[number])
            except TimeoutError:
                return None

    answers = await asyncio.gather(*(client(number) for number in range(100)))
    for number, answer in enumerate(answers):
        if answer is not None:
            assert written(answer) == expected[number], number
    await probe.assert_at_rest()


async def test_the_first_piece_of_a_stream_comes_before_the_last_is_made(probe: Probe, model: Path) -> None:
    body = completion(token_ids(model, 40, number=3200), max_tokens=60, ignore_eos=True, stream=True)
    async with probe.http.post(probe.cluster.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        times = [time.monotonic() async for line in response.content if line.startswith(b"data: {")]
    assert len(times) >= 60
    assert times[-1] - times[0] > 0.5
    await probe.assert_at_rest()


async def test_a_streamed_answer_reports_the_same_usage(probe: Probe, model: Path) -> None:
    body = completion(token_ids(model, 90, number=3300))
    plain = await ask(probe, "/v1/completions", body)
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with probe.http.post(probe.cluster.url + "/v1/completions", json=streamed) as response:
        text = await response.text()
    last = [line for line in text.splitlines() if '"usage":{' in line][-1]
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = await ask(probe, "/v1/completions", body)
    for key in ("prompt_tokens", "completion_tokens"):
        assert usage[key] == plain["usage"][key]
    assert usage["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert text.rstrip().endswith("data: [DONE]")
    await probe.assert_at_rest()
