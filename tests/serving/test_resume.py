"""Decode workers die, hang and stop in mid-answer, and clients get what one undisturbed engine writes.

The tiny model writes bytes that are no UTF-8 half of the time: the hardest text to go on with.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from kvrelay.config import Config
from kvrelay.deploy.local import LocalCluster
from tests.serving import tiny
from tests.serving.conftest import Baseline
from tests.serving.probe import Probe

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

STREAMS = 8
PROMPT_TOKENS = 100
ANSWER_TOKENS = 120
BEGUN_TOKENS = 15
"""Every stream has so many when the worker is lost."""


def config() -> Config:
    plain = tiny.config(arena_pages=2048, kv_blocks=512, prefill=1, decode=2)
    return msgspec.structs.replace(plain, cluster=msgspec.structs.replace(plain.cluster, dead_after_s=2.0))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def probe(tiny_model: Path, http: aiohttp.ClientSession) -> AsyncIterator[Probe]:
    async with LocalCluster(config(), model=tiny_model) as cluster:
        yield Probe(cluster, http)


@dataclass
class Answer:
    """One stream as its client reads it."""

    text: str = ""
    tokens: int = 0
    finishes: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)
    last: str = ""

    @property
    def longest_pause_s(self) -> float:
        return max(after - before for before, after in zip(self.moments_s, self.moments_s[1:], strict=False))

    def take(self, line: str) -> None:
        self.last = line
        if line == "data: [DONE]":
            return
        self.moments_s.append(time.monotonic())
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        self.usages += [event["usage"]] if event.get("usage") else []
        for choice in event["choices"]:
            self.text += choice["text"]
            self.tokens += 1
            self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []


async def read(probe: Probe, body: dict[str, Any], answer: Answer) -> Answer:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with probe.http.post(f"{probe.cluster.url}/v1/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.strip():
                answer.take(line.decode().strip())
    return answer


def bodies(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = [tiny.completion(tiny.ids(rng, PROMPT_TOKENS), ANSWER_TOKENS) for _ in range(STREAMS)]
    for body in made:
        del body["return_token_ids"]
    return made


async def streams_through(probe: Probe, baseline: Baseline, seed: int, lose: Any) -> list[Answer]:
    """Eight streams, in the middle of which ``lose`` strikes; each equals the baseline."""
    asked = bodies(seed)
    expected = [await baseline.ask("/v1/completions", body) for body in asked]
    answers = [Answer() for _ in asked]
    running = [asyncio.create_task(read(probe, body, answer)) for body, answer in zip(asked, answers, strict=True)]
    while min(answer.tokens for answer in answers) < BEGUN_TOKENS:
        assert not any(task.done() for task in running), "too fast: nothing is left to lose"
        await asyncio.sleep(0.002)
    await lose()
    await asyncio.gather(*running)
    for answer, right in zip(answers, expected, strict=True):
        assert answer.text == right["choices"][0]["text"]
        assert answer.finishes == [right["choices"][0]["finish_reason"]]
        assert answer.last == "data: [DONE]"
        (usage,) = answer.usages
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT_TOKENS, ANSWER_TOKENS)
    return answers


async def resumed(probe: Probe) -> tuple[float, float]:
    """How many answers went on elsewhere, and how many did not."""
    values = await probe.metrics(probe.cluster.url)
    return tuple(values.get(f"kvrelay_resumes_total{{outcome={what}}}", 0.0) for what in ("resumed", "failed"))  # type: ignore[return-value]


def report(what: str, answers: list[Answer]) -> None:
    pauses = sorted(answer.longest_pause_s for answer in answers)
    print(f"{what}: longest pause {pauses[-1]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s")  # noqa: T201


async def test_eight_of_eight_streams_outlive_a_kill(probe: Probe, tiny_baseline: Baseline) -> None:
    before = await resumed(probe)
    answers = await streams_through(probe, tiny_baseline, 1, lambda: probe.cluster.kill("decode-0"))
    after = await resumed(probe)
    assert after[0] - before[0] >= STREAMS // 4
    assert after[1] == before[1] == 0
    report("kill -9", answers)
    await probe.cluster.restart("decode-0")
    await probe.assert_at_rest()


@contextmanager
def stopped(pid: int, *, all_of_it: bool) -> Iterator[None]:
    """SIGSTOP: connections stay open. Without ``all_of_it`` the supervisor's heartbeats go on."""
    root = psutil.Process(pid)
    tree = [*([root] if all_of_it else []), *root.children(recursive=True)]
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in tree:
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("all_of_it", [True, False], ids=["the worker", "its engine alone"])
async def test_eight_of_eight_streams_outlive_a_worker_that_stops(
    probe: Probe, tiny_baseline: Baseline, all_of_it: bool
) -> None:
    before = await resumed(probe)
    stop = stopped(probe.cluster.pid("decode-1"), all_of_it=all_of_it)

    async def lose() -> None:
        stop.__enter__()

    try:
        answers = await streams_through(probe, tiny_baseline, 2 + all_of_it, lose)
        after = await resumed(probe)
    finally:
        stop.__exit__(None, None, None)
    assert after[0] - before[0] >= STREAMS // 4
    assert after[1] == before[1] == 0
    report(f"SIGSTOP of {'all' if all_of_it else 'the engine'}", answers)
    await until_ready(probe, "decode-1")
    await probe.assert_at_rest()


async def until_ready(probe: Probe, name: str) -> None:
    for _attempt in range(200):
        async with probe.http.get(f"{probe.cluster.url}/health") as response:
            workers = (await response.json())["workers"]
        if any(worker["name"] == name and worker["ready"] for worker in workers):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} did not come back")


# ---------------------------------------------------------------- requests of every kind

GREEDY = {"temperature": 0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy chat": {**GREEDY, "chat": True},
    "two prompts": {**GREEDY, "prompts": 2},
    "log probabilities": {**GREEDY, "logprobs": 2},
    "least number of tokens": {**GREEDY, "min_tokens": 60, "ignore_eos": False},
    "repetition penalty": {**GREEDY, "repetition_penalty": 1.3},
    "seed": {"seed": 11, "temperature": 1.0},
    "seed of a chat": {"seed": 12, "temperature": 0.8, "top_p": 0.9, "chat": True},
    "seeds of two choices": {"seed": 13, "temperature": 1.0, "n": 2},
    "presence penalty": {**GREEDY, "presence_penalty": 1.5},
    "frequency penalty": {**GREEDY, "frequency_penalty": 0.7},
    "a grammar": {**GREEDY, "structured_outputs": {"regex": "([a-z]{3} ){60}"}, "ignore_eos": False},
}


def body_of(kind: str, number: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(f"{kind} {number}")
    fields = dict(KINDS[kind])
    body = tiny.completion(tiny.ids(rng, PROMPT_TOKENS), ANSWER_TOKENS)
    del body["return_token_ids"], body["temperature"]
    if fields.pop("prompts", 1) > 1:
        body["prompt"] = [body["prompt"], tiny.ids(rng, PROMPT_TOKENS)]
    if not fields.pop("chat", False):
        return "/v1/completions", body | fields
    words = "".join(chr(97 + rng.randrange(26)) for _ in range(40))
    body["messages"] = [{"role": "user", "content": words}]
    del body["prompt"]
    return "/v1/chat/completions", body | fields


def expected_of(whole: dict[str, Any]) -> dict[int, tuple[str, str]]:
    return {
        choice["index"]: (choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"])
        for choice in whole["choices"]
    }


@dataclass
class Choices:
    """All choices of one stream, as its client puts them together."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    events: int = 0
    last: str = ""

    def take(self, line: str) -> None:
        self.last, self.events = line, self.events + 1
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            said = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + (said or "")
            if choice["finish_reason"]:
                assert choice["index"] not in self.finishes
                self.finishes[choice["index"]] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprobs += zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)

    async def read(self, probe: Probe, route: str, body: dict[str, Any]) -> None:
        async with probe.http.post(probe.cluster.url + route, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.strip():
                    self.take(line.decode().strip())


async def test_requests_of_every_kind_go_on_as_they_would_have(probe: Probe, tiny_baseline: Baseline) -> None:
    asked = [(kind, *body_of(kind, number)) for kind in KINDS for number in range(2)]
    expected = [await tiny_baseline.ask(route, body) for _, route, body in asked]
    before = await resumed(probe)
    answers = [Choices() for _ in asked]
    running = [
        asyncio.create_task(answer.read(probe, route, body))
        for answer, (_, route, body) in zip(answers, asked, strict=True)
    ]
    while min(answer.events for answer in answers) < BEGUN_TOKENS:
        assert not any(task.done() for task in running), "too fast: nothing is left to lose"
        await asyncio.sleep(0.002)
    with stopped(probe.cluster.pid("decode-0"), all_of_it=True):
        await asyncio.gather(*running)
        after = await resumed(probe)
    for (kind, _, _), answer, whole in zip(asked, answers, expected, strict=True):
        assert answer.last == "data: [DONE]", kind
        assert {index: (answer.texts[index], answer.finishes[index]) for index in answer.texts} == expected_of(whole), (
            kind
        )
        if kind == "log probabilities":
            listed = whole["choices"][0]["logprobs"]
            assert answer.logprobs == list(zip(listed["tokens"], listed["text_offset"], strict=True))
    assert after[0] - before[0] >= len(asked) // 4
    assert after[1] == before[1]
    await until_ready(probe, "decode-0")
    await probe.assert_at_rest()
