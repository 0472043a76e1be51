"""A running cluster as its clients see it: streams, the moments of their tokens, and what the router tells of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec
from tokenizers import Tokenizer

from benchmarks.prompts import Prompts
from kvrelay.deploy.local import LocalCluster


@dataclass
class Stream:
    """What one client saw, and when."""

    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    """Moments of the tokens; like ``asked_s`` on the monotonic clock."""
    asked_s: float = 0.0
    request_id: str = ""
    done: bool = False
    error: bool = False
    timeline: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.done and not self.error

    def says(self, right: list[int]) -> bool:
        """Whole, and these tokens."""
        return self.is_whole and self.tokens == right

    @property
    def received_s(self) -> float:
        """When the router received it, which its timeline counts from, on the clock of ``came_s``.

        Late by the way of the first token from the router to its client, and so is all that is counted from it.
        """
        return self.came_s[0] - float(self.timeline["events"]["first_token"])

    @property
    def first_token_s(self) -> float:
        return self.came_s[0] - self.asked_s

    @property
    def longest_pause_s(self) -> float:
        """Between two tokens."""
        return max((after - before for before, after in zip(self.came_s, self.came_s[1:], strict=False)), default=0.0)

    def take(self, data: bytes) -> None:
        """One event."""
        if data == b"[DONE]":
            self.done = True
        elif data:
            event = msgspec.json.decode(data)
            self.error = self.error or "error" in event
            ids = [id for choice in event.get("choices", []) for id in choice.get("token_ids") or []]
            self.tokens += ids
            self.came_s += [time.monotonic()] * len(ids)


class Knows(Protocol):
    """Gives the right answer to each prompt."""

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """``count`` tokens."""


class Asking:
    """Clients of one cluster."""

    def __init__(
        self, cluster: LocalCluster, http: aiohttp.ClientSession, sampling: Mapping[str, float] | None = None
    ) -> None:
        """``sampling``: fields of each request; greedy without."""
        self._sampling = sampling or {"temperature": 0}
        self.cluster = cluster
        self.http = http
        self.model = cluster.config.model.name or cluster.model.name
        self._prompts = Prompts(7)
        # Half a character at a prompt's end would begin the answer's text: mock workers know nothing of that.
        self._end: list[int] = Tokenizer.from_file(str(cluster.model / "tokenizer.json")).encode(" and so").ids

    def __repr__(self) -> str:
        return f"<Asking {self.cluster!r}>"

    def prompt(self, tokens: int) -> list[int]:
        return self._prompts.of(tokens - len(self._end)) + self._end

    async def stream(self, prompt: list[int], count: int, stream: Stream | None = None) -> Stream:
        """Ask for ``count`` tokens; ``stream`` is filled as they come."""
        stream = stream or Stream()
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, **self._sampling}
        url, stream.asked_s = f"{self.cluster.url}/v1/completions", time.monotonic()
        async with self.http.post(url, json=body | {"return_token_ids": True, "stream": True}) as response:
            response.raise_for_status()
            stream.request_id = response.headers["x-request-id"]
            async for line in response.content:
                stream.take(line.removeprefix(b"data: ").strip())
        stream.timeline = await self.timeline(stream)
        return stream

    async def timeline(self, stream: Stream) -> dict[str, Any]:
        """What the router tells of a request so far."""
        async with self.http.get(f"{self.cluster.url}/kvrelay/requests/{stream.request_id}") as told:
            return await told.json() if told.status == 200 else {}

    async def begun(self, prompt: list[int], count: int, after: int) -> tuple[Stream, asyncio.Task[Stream]]:
        """A stream that has ``after`` tokens already, and what reads the rest."""
        stream = Stream()
        reading = asyncio.create_task(self.stream(prompt, count, stream))
        while len(stream.tokens) < after and not reading.done():
            await asyncio.sleep(0.01)
        return stream, reading

    async def keep_asking(
        self, stop: asyncio.Event, counts: dict[str, int], prompt_tokens: int, tokens: int, knows: Knows
    ) -> None:
        """One client until ``stop``; it counts answers that were whole and right (``answered``), whole and wrong
        (``wrong``), and others (``failed``)."""
        while not stop.is_set():
            prompt = self.prompt(prompt_tokens)
            try:
                stream = await self.stream(prompt, tokens)
            except aiohttp.ClientError:
                counts["failed"] += 1
                continue
            wrong = "wrong" if stream.is_whole else "failed"
            counts["answered" if stream.says(knows.answer(prompt, tokens)) else wrong] += 1

    async def metric(self, line: str) -> float:
        """Sum of the metric lines that begin so."""
        async with self.http.get(f"{self.cluster.url}/metrics") as response:
            rows = (await response.text()).splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(line))

    async def until(self, metric: str, least: float, within_s: float = 60.0) -> float:
        """Wait until a metric is at least so; how long that took."""
        began = time.monotonic()
        while await self.metric(metric) < least:
            if time.monotonic() - began > within_s:
                raise TimeoutError(f"{metric} stays under {least}")
            await asyncio.sleep(0.01)
        return time.monotonic() - began
