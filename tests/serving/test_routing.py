"""Where requests go on real engines, and what the router knew before: short prompts and next turns stay on D, hits go
to their holder until it queues, times are foretold, and no page is expected where none is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvrelay.config_text import render
from kvrelay.deploy.key import write_secret
from kvrelay.types import Role, Value
from tests.serving.probe import Probe
from tests.serving.tiny import PAGE_TOKENS, completion, ids

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LEARNING, AFTERWARDS = 50, 20
"""Requests after which predictions have to hold, and those on which it is seen."""


class Routed(Value, frozen=True, kw_only=True):
    """What the router keeps of one request."""

    path: str
    prefill: str
    """Empty: D computed the prompt."""
    decode: str
    reason: str
    """Why it was not split; empty when it was."""
    expected_tokens: int
    """Prompt tokens that were thought to be cached where it went, and those that were."""
    cached_tokens: int
    predicted_s: float
    """Time to the first token, and what it was."""
    ttft_s: float
    answer: tuple[int, ...]


async def route(probe: Probe, prompt: list[int], max_tokens: int = 3) -> Routed:
    """Ask for a stream, and read what became of it."""
    body = completion(prompt, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
    async with probe.http.post(f"{probe.cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        name = response.headers["x-request-id"]
    async with probe.http.get(f"{probe.cluster.url}/kvrelay/requests/{name}") as response:
        report: dict[str, Any] = await response.json()
    chosen = report["decision"][0]
    return Routed(
        path=report["path"],
        prefill=report.get("prefill_worker", ""),
        decode=report["decode_worker"],
        reason=report.get("local_reason", ""),
        expected_tokens=chosen["cached_tokens"],
        cached_tokens=(events[-1]["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        predicted_s=chosen["ttft_s"],
        ttft_s=report["actual"]["ttft_s"],
        answer=tuple(token for event in events for choice in event["choices"] for token in choice["token_ids"]),
    )


async def restart_router(probe: Probe, local_prefill: str) -> None:
    """A router that knows nothing yet, with another answer to whether prompts may stay on D."""
    cluster = probe.cluster
    router = msgspec.structs.replace(cluster.config.router, local_prefill=local_prefill)
    write_secret(cluster.run.config, render(msgspec.structs.replace(cluster.config, router=router)))
    await cluster.restart("router")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def choosing(shaped: Probe) -> AsyncIterator[Probe]:
    """The same engines behind a router that may leave prompts on D."""
    await restart_router(shaped, "auto")
    yield shaped
    await restart_router(shaped, "never")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def experienced(choosing: Probe) -> Probe:
    """The router has seen hand-offs of short and of long prompts."""
    rng = random.Random(50)
    for tokens in (20, 1500, 300, 60, 900, 40) * 2:
        await route(choosing, ids(rng, tokens))
    return choosing


async def test_after_fifty_requests_the_first_token_comes_when_it_was_foretold(choosing: Probe) -> None:
    skip_where_workers_share_cores(choosing)
    rng = random.Random(51)
    seen = [await route(choosing, ids(rng, rng.randrange(20, 1500))) for _ in range(LEARNING + AFTERWARDS)]
    errors = [abs(each.predicted_s / each.ttft_s - 1) for each in seen]
    assert statistics.median(errors[LEARNING:]) <= 0.2, [round(error, 2) for error in errors]
    assert {each.path for each in seen[:8]} == {"remote_prefill"}, "the operator's roles hold at first"


async def test_short_prompts_stay_on_an_idle_d(experienced: Probe) -> None:
    skip_where_workers_share_cores(experienced)
    rng = random.Random(52)
    short = [await route(experienced, ids(rng, 8)) for _ in range(6)]
    assert sum(each.reason == "cheaper" for each in short) > 3, short
    await experienced.assert_at_rest()


async def test_beside_answers_short_prompts_stay_on_d_and_long_ones_do_not(experienced: Probe) -> None:
    if (os.cpu_count() or 1) < len(experienced.cluster.workers):
        pytest.skip("all engines compute at once here, each needs a core for its times to be foretold")
    prefillers = [worker for worker in experienced.cluster.workers if worker.role is Role.PREFILL]
    rng, short, long = random.Random(56), [], []
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(route(experienced, ids(rng, 40), max_tokens=400)) for _ in range(4)]
        for _ in range(6):
            longs = [group.create_task(route(experienced, ids(rng, 1500))) for _ in prefillers]
            short.append(await route(experienced, ids(rng, 64)))
            long += [await each for each in longs]
    assert sum(each.reason == "cheaper" for each in short) > 3, short
    assert sum(each.path == "remote_prefill" for each in long) > len(long) / 2, long
    assert [len(answer.result().answer) for answer in answers] == [400] * 4
    await experienced.assert_at_rest()


async def test_a_turn_stays_on_d_where_the_kv_of_the_one_before_is(experienced: Probe) -> None:
    skip_where_workers_share_cores(experienced)
    rng, reasons = random.Random(53), []
    for _ in range(3):
        history = ids(rng, 1000)
        first = await route(experienced, history, max_tokens=40)
        await settled()
        second = await route(experienced, [*history, *first.answer, *ids(rng, 5)])
        assert second.cached_tokens == second.expected_tokens > 1000, second
        reasons.append(second.reason)
    assert reasons.count("cheaper") > 1, reasons
    await experienced.assert_at_rest()


async def test_hits_go_where_their_prefix_is_and_spread_when_that_queues(choosing: Probe) -> None:
    """Both P share a node, so its store serves either: who computed the prefix is no better than who can load it."""
    prefillers = {worker.name for worker in choosing.cluster.workers if worker.role is Role.PREFILL}
    rng = random.Random(54)
    prefix = ids(rng, 1024)
    await route(choosing, prefix + ids(rng, 300))
    await settled()
    again = [await route(choosing, prefix + ids(rng, 300)) for _ in range(4)]
    assert all(each.cached_tokens == each.expected_tokens == 1024 for each in again)
    at_once = await asyncio.gather(*(route(choosing, prefix + ids(rng, 600)) for _ in range(10)))
    assert {each.prefill for each in at_once if each.prefill} == prefillers
    await choosing.assert_at_rest()


async def test_no_page_is_expected_where_none_is_also_after_workers_and_the_router_start_anew(choosing: Probe) -> None:
    """More prompts than any cache holds: what was evicted, lost with a worker, or never heard of is not expected."""
    rng = random.Random(55)
    stems = [ids(rng, 700) for _ in range(16)]
    found = await phantoms(choosing, rng, stems)
    for member in (one_of_two(choosing), "router"):
        await choosing.cluster.restart(member)
        await settled()
        found += await phantoms(choosing, rng, stems)
    expected = sum(each.expected_tokens for each in found)
    assert [each for each in found if each.expected_tokens > each.cached_tokens] == []
    assert expected > 2000
    await choosing.assert_at_rest()


def skip_where_workers_share_cores(probe: Probe) -> None:
    decode = [worker.role for worker in probe.cluster.workers].count(Role.DECODE)
    if decode > 1 and (os.cpu_count() or 1) <= len(probe.cluster.workers):
        pytest.skip("on two cores the second D spins for a second after each answer, on the core of the only P")


def one_of_two(probe: Probe) -> str:
    """A worker that is not the only one of its role."""
    roles = [worker.role for worker in probe.cluster.workers]
    return next(worker.name for worker in probe.cluster.workers if roles.count(worker.role) > 1)


async def phantoms(probe: Probe, rng: random.Random, stems: list[list[int]]) -> list[Routed]:
    """Requests, one after another, whose beginnings others had."""
    seen = []
    for _ in range(12):
        stem = rng.choice(stems)
        seen.append(await route(probe, stem[: rng.randrange(PAGE_TOKENS, len(stem))] + ids(rng, 40)))
        await settled()
    return seen


async def settled() -> None:
    """Events of what the last request left behind are here: workers and stores tell at once."""
    await asyncio.sleep(0.3)
