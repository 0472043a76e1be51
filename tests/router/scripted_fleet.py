"""One P and some D's that know the same answer by heart, behind a router, and what a client hears of it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvrelay.types import Role
from tests.fleet.values import store
from tests.router.cluster import Cluster
from tests.router.scripted_vllm import Script, ScriptedVllm

TEXT = "one two, the quick brown 🦊 jumps über the lazy dog: Ωé! three four"
CHAT = [{"role": "user", "content": "Hello, you"}]
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Heard:
    """One streamed answer as its client sees it."""

    texts: dict[int, str]
    finishes: dict[int, list[str]]
    usages: list[dict[str, Any]]
    ids: set[str]
    last: bytes
    raw: bytes
    logprobs: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """Tokens, and where each begins."""
    reasoning: str = ""
    roles: dict[int, list[str]] = field(default_factory=dict)
    calls: list[dict[str, str]] = field(default_factory=list)
    """Pieces of the only tool call."""


def heard(events: list[bytes]) -> Heard:
    result = Heard({}, {}, [], set(), events[-1], b"\n".join(events))
    for event in events:
        if event == b"data: [DONE]" or event.startswith(b'data: {"error"'):
            continue
        said = json.loads(event.removeprefix(b"data: "))
        if said.get("usage"):
            result.usages.append(said["usage"])
        for choice in said["choices"]:
            result.ids.add(said["id"])
            delta = choice.get("delta", {})
            text = delta.get("content", "") if "delta" in choice else choice["text"]
            result.texts[choice["index"]] = result.texts.get(choice["index"], "") + text
            if "role" in delta:
                result.roles.setdefault(choice["index"], []).append(delta["role"])
            result.reasoning += delta.get("reasoning", "")
            for call in delta.get("tool_calls", []):
                result.calls.append(call["function"])
            if listed := choice.get("logprobs"):
                places = zip(listed["tokens"], listed["text_offset"], strict=True)
                result.logprobs.setdefault(choice["index"], []).extend(places)
            if choice.get("finish_reason"):
                result.finishes.setdefault(choice["index"], []).append(choice["finish_reason"])
    return result


@dataclass
class Fleet:
    """One P and two scripted D's."""

    cluster: Cluster
    script: Script
    replays: bool

    async def add(self, name: str) -> ScriptedVllm:
        fake = ScriptedVllm(tokens=self.cluster.tokens, script=self.script)
        await self.cluster.add(name, Role.DECODE, fake=fake, replays=self.replays)
        return fake

    async def ask(self, **body: Any) -> Heard:
        body.setdefault("max_tokens", 500)
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return heard(await self.cluster.stream(route, **body))

    async def resumes(self, outcome: str = "resumed") -> float:
        return await self.cluster.metric(f'kvrelay_resumes_total{{outcome="{outcome}"')


@asynccontextmanager
async def running(folder: Path, decodes: int = 2, *, replays: bool = False, **more: Any) -> AsyncIterator[Fleet]:
    async with Cluster(folder, **more) as cluster:
        script = Script(Tokenizer.from_file(str(folder / "tokenizer.json")), TEXT)
        fleet = Fleet(cluster, script, replays)
        await cluster.join(store())
        await cluster.add("p1", Role.PREFILL, replays=replays)
        for number in range(decodes):
            await fleet.add(f"d{number + 1}")
        yield fleet
        await cluster.at_rest()


def hung(fleet: Fleet) -> str:
    """The D of the only request."""
    (flight,) = fleet.cluster.router.brain._flights.values()
    return flight.decode.worker


def hand_over(fleet: Fleet, worker: str) -> None:
    desk = fleet.cluster.router._readings.desk
    assert desk is not None
    desk.obey(fleet.cluster.router.brain.drains.hand_over(worker, time.monotonic()))
