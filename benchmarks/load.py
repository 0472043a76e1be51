"""The mixed load: eight streams of short prompts and long answers, while long prompts keep coming."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.machine import LONG_EVERY_S, STREAM_OUTPUT_TOKENS
from benchmarks.progress import Say
from benchmarks.prompts import Prompts
from benchmarks.quantiles import spread_ms
from benchmarks.split import Handed

STREAMS = 8
STREAM_TOKENS = (64, STREAM_OUTPUT_TOKENS)
"""Prompt and answer of a stream's requests; a stream asks again when its answer is whole."""
LONG_TOKENS = (1500, 16)
WARM_UP_S = 20.0
"""Until every stream has asked, a long prompt is on its way, and a router has learned what hand-offs take."""
DRAIN_S = 180.0
"""A service that has not answered by then hangs."""


class Service(Protocol):
    """A system under test that answers prompts."""

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Handed:
        """Send one request and read its whole answer."""
        ...


@dataclass
class Window:
    """Requests of the load, and the time of it that counts.

    All requests come to their end, so that slow ones are counted like others; what was sent outside is not.
    """

    begin_s: float
    end_s: float
    streams: list[Handed] = field(default_factory=list)
    longs: list[Handed] = field(default_factory=list)

    def has(self, moment_s: float) -> bool:
        return self.begin_s <= moment_s < self.end_s

    def figures(self) -> dict[str, Any]:
        """Spreads in ms; ``gap`` is P's response to D's first token of all requests that were split, if any was."""
        streams, longs = self._sent(self.streams), self._sent(self.longs)
        everyone = self.streams + self.longs
        written = sum(self.has(token_s) for handed in everyone for token_s in handed.answer.token_s)
        gaps = [handed.gap_s for handed in streams + longs if handed.gap_s is not None]
        return {
            "requests": len(streams) + len(longs),
            **({"gap": spread_ms(gaps)} if gaps else {}),
            "stream_ttft": spread_ms(handed.answer.ttft_s for handed in streams),
            "long_ttft": spread_ms(handed.answer.ttft_s for handed in longs),
            "stream_itl": spread_ms(self._itl()),
            "tokens_per_s": round(written / (self.end_s - self.begin_s), 1),
        }

    def _sent(self, requests: Sequence[Handed]) -> list[Handed]:
        return [handed for handed in requests if self.has(handed.answer.sent_s)]

    def _itl(self) -> Iterator[float]:
        for handed in self.streams:
            for token_s, gap_s in zip(handed.answer.token_s[1:], handed.answer.gaps_s, strict=True):
                if self.has(token_s):
                    yield gap_s


async def measure(
    service: Service, duration_s: float, say: Say, *, warm_up_s: float = WARM_UP_S, drain_s: float = DRAIN_S
) -> dict[str, Any]:
    """Run the load for ``duration_s`` seconds after ``warm_up_s``. Raises ``TimeoutError`` when answers do not end."""
    begin_s = time.monotonic() + warm_up_s
    window, load = Window(begin_s, begin_s + duration_s), Prompts(seed=7)
    async with asyncio.timeout(warm_up_s + duration_s + drain_s), asyncio.TaskGroup() as group:
        for index in range(STREAMS):
            group.create_task(_stream(service, load, index, window))
        group.create_task(_longs(service, load, window))
    figures = window.figures()
    for name, spread in figures.items():
        say(f"mixed load, {name}: {spread}")
    return figures


async def _stream(service: Service, prompts: Prompts, index: int, window: Window) -> None:
    await asyncio.sleep(index)  # apart, or all eight would ask again together for ever
    while time.monotonic() < window.end_s:
        window.streams.append(await service.ask(prompts.of(STREAM_TOKENS[0]), STREAM_TOKENS[1]))


async def _longs(service: Service, prompts: Prompts, window: Window) -> None:
    """Open loop, and the same arrivals whatever else is asked meanwhile."""

    async def ask() -> None:
        window.longs.append(await service.ask(prompts.of(LONG_TOKENS[0]), LONG_TOKENS[1]))

    arrivals = Prompts(seed=8)
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < window.end_s:
            group.create_task(ask())
            await asyncio.sleep(arrivals.gap_s(LONG_EVERY_S))
