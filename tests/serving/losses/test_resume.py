"""Decode workers die, hang and stop in mid-answer, and clients get what one undisturbed engine writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.serving import tiny
from tests.serving.conftest import Baseline
from tests.serving.losses.breakable import Breakable
from tests.serving.losses.streams import (
    ANSWER_TOKENS,
    BEGUN_TOKENS,
    PROMPT_TOKENS,
    STREAMS,
    Answer,
    bodies,
    equal_baseline,
    streams_through,
)
from tests.serving.tiny import at_most

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


def report(what: str, answers: list[Answer]) -> None:
    pauses = sorted(answer.longest_pause_s for answer in answers)
    print(f"{what}: longest pause {pauses[-1]:.2f} s, median {pauses[len(pauses) // 2]:.2f} s")  # noqa: T201


async def test_eight_of_eight_streams_outlive_a_kill_and_so_do_requests_whose_pages_are_on_their_way(
    probe: Breakable, tiny_baseline: Baseline
) -> None:
    before = await probe.resumed()
    waiting = bodies(4)
    await at_most(4, (partial(tiny_baseline.ask, "/v1/completions", body) for body in waiting))
    requests: list[asyncio.Task[None]] = []

    async def lose() -> str:
        with probe.wires.between_stores():
            requests.append(asyncio.create_task(equal_baseline(probe, tiny_baseline, waiting)))
            victim = await probe.until_waiting(STREAMS // 4)
            await probe.cluster.kill(victim)
            return victim

    answers, victim = await streams_through(probe, tiny_baseline, bodies(1), lose)
    await asyncio.gather(*requests)
    after = await probe.resumed()
    assert after[0] - before[0] >= STREAMS // 4
    assert after[1] == before[1] == 0
    report("kill -9", answers)
    await probe.cluster.restart(victim)
    await probe.assert_at_rest()


@pytest.mark.parametrize("all_of_it", [True, False], ids=["the worker", "its engine alone"])
async def test_eight_of_eight_streams_outlive_a_worker_that_stops(
    probe: Breakable, tiny_baseline: Baseline, all_of_it: bool
) -> None:
    before = await probe.resumed()
    with contextlib.ExitStack() as until_all_ended:

        async def lose() -> str:
            victim = await probe.busiest()
            until_all_ended.enter_context(probe.stopped(victim, all_of_it=all_of_it))
            return victim

        answers, victim = await streams_through(probe, tiny_baseline, bodies(2 + all_of_it), lose)
        after = await probe.resumed()
    assert after[0] - before[0] >= STREAMS // 4
    assert after[1] == before[1] == 0
    report(f"SIGSTOP of {'all' if all_of_it else 'the engine'}", answers)
    await probe.until_ready(victim)
    await probe.assert_at_rest()


# ---------------------------------------------------------------- requests of every kind

UNDERWAY_TRIES = 5
GREEDY = {"temperature": 0}
LETTERS = {"type": "string", "pattern": "^[a-z]{100}$"}
SCHEMA = {"type": "object", "properties": {"word": LETTERS}, "required": ["word"], "additionalProperties": False}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "word", "strict": True, "schema": SCHEMA}}
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
    "a schema": {**GREEDY, "chat": True, "response_format": RESPONSE_FORMAT, "ignore_eos": False},
    "a stop string": {**GREEDY, "stops": True},
    "a stop string of a chat": {**GREEDY, "stops": True, "chat": True},
}


async def asked_of(baseline: Baseline, kind: str, number: int) -> tuple[str, dict[str, Any]]:
    """Route and body of a request of ``kind``."""
    route, body = body_of(kind, number)
    if body.pop("stops", False):
        (text, _) = expected_of(await baseline.ask(route, body))[0]
        body["stop"] = [stop_of(text)]
    return route, body


def stop_of(text: str) -> str:
    """What the second half of ``text`` has and the first has not."""
    places = range(len(text) // 2, len(text) - 3)
    pieces = ((at, text[at : at + 3]) for at in places)
    return next(piece for at, piece in pieces if piece.isascii() and text.find(piece) == at)


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
    return {choice["index"]: (said_of(choice), choice["finish_reason"]) for choice in whole["choices"]}


def said_of(choice: dict[str, Any]) -> str:
    """Text of a choice or of a piece of one; what a tool is called with, where it calls one."""
    if "text" in choice:
        return str(choice["text"])
    said = choice["delta"] if "delta" in choice else choice["message"]
    calls = said.get("tool_calls") or []
    return (said.get("content") or "") + "".join(call["function"].get("arguments") or "" for call in calls)


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
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + said_of(choice)
            if choice["finish_reason"]:
                assert choice["index"] not in self.finishes
                self.finishes[choice["index"]] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.logprobs += zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)

    async def read(self, probe: Breakable, route: str, body: dict[str, Any]) -> None:
        async with probe.http.post(probe.cluster.url + route, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.strip():
                    self.take(line.decode().strip())


@dataclass
class Asked:
    """One request of every kind, and what its client has of it."""

    bodies: list[tuple[str, dict[str, Any]]]
    answers: list[Choices] = field(default_factory=lambda: [Choices() for _ in KINDS])
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def ask(self, probe: Breakable) -> None:
        self.running = [
            asyncio.create_task(answer.read(probe, route, body))
            for answer, (route, body) in zip(self.answers, self.bodies, strict=True)
        ]

    async def all_begun(self) -> bool:
        """False when an answer ends before another has begun."""
        while min(answer.events for answer in self.answers) < BEGUN_TOKENS:
            if any(task.done() for task in self.running):
                return False
            await asyncio.sleep(0.002)
        return True

    async def ended(self) -> None:
        await asyncio.gather(*self.running)

    async def equal(self, baseline: Baseline) -> None:
        """Each of the answers, which ended, is what an undisturbed engine writes."""
        expected = await at_most(4, (partial(baseline.ask, route, body) for route, body in self.bodies))
        for kind, answer, whole in zip(KINDS, self.answers, expected, strict=True):
            assert answer.last == "data: [DONE]", kind
            said = {index: (answer.texts[index], answer.finishes[index]) for index in answer.texts}
            assert said == expected_of(whole), kind
            if kind == "log probabilities":
                listed = whole["choices"][0]["logprobs"]
                assert answer.logprobs == list(zip(listed["tokens"], listed["text_offset"], strict=True))


async def every_kind_underway(probe: Breakable, baseline: Baseline, first: int) -> Asked:
    """Requests of all kinds, written at once: the first grammar of an engine takes longer than short answers."""
    for number in range(first, first + UNDERWAY_TRIES):
        asked = Asked([await asked_of(baseline, kind, number) for kind in KINDS])
        asked.ask(probe)
        if await asked.all_begun():
            return asked
        await asked.ended()
        await asked.equal(baseline)
    pytest.fail("answers ended before others began, each time: nothing was left to lose")


@pytest.mark.parametrize("first", [0, UNDERWAY_TRIES])
async def test_requests_of_every_kind_go_on_as_they_would_have(
    probe: Breakable, tiny_baseline: Baseline, first: int
) -> None:
    before = await probe.resumed()
    asked = await every_kind_underway(probe, tiny_baseline, first)
    victim = await probe.busiest()
    with probe.stopped(victim):
        await asked.ended()
        after = await probe.resumed()
    await asked.equal(tiny_baseline)
    assert after[0] - before[0] >= len(KINDS) // 4
    assert after[1] == before[1] == 0
    await probe.until_ready(victim)
    await probe.assert_at_rest()


CALL_TOKENS = 300
CALL: dict[str, Any] = {
    **GREEDY,
    "model": tiny.MODEL,
    "max_tokens": CALL_TOKENS,
    "messages": [{"role": "user", "content": "Paint it green."}],
    "tools": [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}],
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}], ids=["any", "one"]
)
async def test_a_tool_call_goes_on_as_it_would_have(probe: Breakable, tiny_baseline: Baseline, choice: object) -> None:
    route, body = "/v1/chat/completions", CALL | {"tool_choice": choice}
    before = await probe.resumed()
    right = await tiny_baseline.ask(route, body)
    answer, undisturbed = Choices(), Choices()
    running = asyncio.create_task(answer.read(probe, route, body))
    while answer.events < BEGUN_TOKENS:
        assert not running.done()
        await asyncio.sleep(0.002)
    victim = await probe.busiest()
    with probe.stopped(victim):
        await running
        after = await probe.resumed()
    assert (after[0] - before[0], after[1]) == (1, 0)
    await probe.until_ready(victim)
    await undisturbed.read(probe, route, body)
    assert answer.last == "data: [DONE]"
    assert (answer.texts, answer.finishes) == (undisturbed.texts, undisturbed.finishes)
    assert json.loads(answer.texts[0]) == json.loads(expected_of(right)[0][0]), "the engine that answers in one piece"
    await probe.assert_at_rest()
