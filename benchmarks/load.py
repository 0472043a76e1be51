"""The mixed load: eight streams of short prompts and long answers, while long prompts keep coming."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machine import LONG_EVERY_S, STREAM_OUTPUT_TOKENS
from benchmarks.progress import Say
from benchmarks.prompts import Prompts
from benchmarks.quantiles import spread_ms
from benchmarks.split import Handed, Split

STREAMS = 8
STREAM_TOKENS = (64, STREAM_OUTPUT_TOKENS)
"""Prompt and answer of a stream's requests; a stream asks again when its answer is whole."""
LONG_TOKENS = (1500, 16)


@dataclass
class Tally:
    """Requests that ended within the measured time."""

    streams: list[Handed] = field(default_factory=list)
    longs: list[Handed] = field(default_factory=list)

    def figures(self, duration_s: float) -> dict[str, Any]:
        """Spreads in ms; ``gap`` is P's response to D's first token of all requests that were split."""
        everyone = self.streams + self.longs
        written = sum(len(handed.answer.token_s) for handed in everyone)
        return {
            "gap": spread_ms(handed.gap_s for handed in everyone if handed.gap_s is not None),
            "stream_ttft": spread_ms(handed.answer.ttft_s for handed in self.streams),
            "long_ttft": spread_ms(handed.answer.ttft_s for handed in self.longs),
            "stream_itl": spread_ms(gap for handed in self.streams for gap in handed.answer.gaps_s),
            "tokens_per_s": round(written / duration_s, 1),
        }


async def measure(split: Split, duration_s: float, say: Say) -> dict[str, Any]:
    """Run the load for ``duration_s`` seconds; what has not ended by then is dropped."""
    tally = Tally()
    prompts = Prompts(seed=7)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stream(split, prompts, index, tally)) for index in range(STREAMS)]
        tasks.append(group.create_task(_longs(split, prompts, tally)))
        await asyncio.sleep(duration_s)
        for task in tasks:
            task.cancel()
    figures = tally.figures(duration_s)
    for name, spread in figures.items():
        say(f"mixed load, {name}: {spread}")
    return figures


async def _stream(split: Split, prompts: Prompts, index: int, tally: Tally) -> None:
    await asyncio.sleep(index)  # apart, or all eight would ask again together for ever
    while True:
        tally.streams.append(await split.ask(prompts.of(STREAM_TOKENS[0]), STREAM_TOKENS[1]))


async def _longs(split: Split, prompts: Prompts, tally: Tally) -> None:
    async def ask() -> None:
        tally.longs.append(await split.ask(prompts.of(LONG_TOKENS[0]), LONG_TOKENS[1]))

    with contextlib.suppress(asyncio.CancelledError):
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(ask())
                await asyncio.sleep(prompts.gap_s(LONG_EVERY_S))
