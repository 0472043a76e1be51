"""Streams of the tiny model as their clients read them, and what they should have read.

Half of the time the model writes bytes that are no UTF-8: the hardest text to go on with.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.serving import tiny
from tests.serving.conftest import Baseline
from tests.serving.probe import Probe
from tests.serving.tiny import at_most

STREAMS = 8
PROMPT_TOKENS = 100
ANSWER_TOKENS = 120
BEGUN_TOKENS = 15
"""Every stream has so many when something is lost."""


@dataclass
class Answer:
    """One stream as its client reads it."""

    text: str = ""
    tokens: int = 0
    finishes: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)
    last: str = ""
    request_id: str = ""

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

    def assert_whole(self, right: Any) -> None:
        """It is what the baseline ``right`` is, from its first byte to its end."""
        (choice,) = right["choices"]
        assert self.text == choice["text"]
        assert self.finishes == [choice["finish_reason"]]
        assert self.last == "data: [DONE]"
        (usage,) = self.usages
        for what in ("prompt_tokens", "completion_tokens"):
            assert usage[what] == right["usage"][what]


async def read(probe: Probe, body: dict[str, Any], answer: Answer) -> Answer:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with probe.http.post(f"{probe.cluster.url}/v1/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        answer.request_id = response.headers["x-request-id"]
        async for line in response.content:
            if line.strip():
                answer.take(line.decode().strip())
    return answer


async def equal_baseline(probe: Probe, baseline: Baseline, asked: list[dict[str, Any]]) -> None:
    """Ask for all streams at once; each is whole."""
    expected = [await baseline.ask("/v1/completions", body) for body in asked]
    answers = await asyncio.gather(*(read(probe, body, Answer()) for body in asked))
    for answer, right in zip(answers, expected, strict=True):
        answer.assert_whole(right)


def bodies(seed: int, count: int = STREAMS, answer_tokens: int = ANSWER_TOKENS) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = [tiny.completion(tiny.ids(rng, PROMPT_TOKENS), answer_tokens) for _ in range(count)]
    for body in made:
        del body["return_token_ids"]
    return made


async def streams_through(
    probe: Probe, baseline: Baseline, asked: list[dict[str, Any]], lose: Callable[[], Awaitable[str]]
) -> tuple[list[Answer], str]:
    """Streams in the middle of which ``lose`` strikes, and the name of what is lost; each equals the baseline."""
    expected = await at_most(4, (partial(baseline.ask, "/v1/completions", body) for body in asked))
    answers = [Answer() for _ in asked]
    running = [asyncio.create_task(read(probe, body, answer)) for body, answer in zip(asked, answers, strict=True)]
    while min(answer.tokens for answer in answers) < BEGUN_TOKENS:
        assert not any(task.done() for task in running), "too fast: nothing is left to lose"
        await asyncio.sleep(0.002)
    lost = await lose()
    await asyncio.gather(*running)
    for answer, right in zip(answers, expected, strict=True):
        answer.assert_whole(right)
    return answers, lost
