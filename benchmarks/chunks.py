"""How long short prompts wait behind long ones in one engine, and how long streams stall, by chunk sizes.

Run:  python -m benchmarks.chunks [BUDGET,SHARED ...]          (two engines at a time, each on a core of its own)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.answers import Answer, completion, stream
from benchmarks.machine import LONG_EVERY_S, describe
from benchmarks.progress import Say, say_with_clock
from benchmarks.prompts import Prompts
from benchmarks.quantiles import ms, spread_ms
from benchmarks.split import config
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.server import plain_engine

RESULTS = Path(__file__).parent / "results" / "chunks.json"
DEFAULT = ("2048,0", "512,0", "512,64", "256,64", "256,0", "128,64")
"""Token budget of a step, and what one prompt may take of it while others want it too (0: all)."""
SHORT_TOKENS, LONG_TOKENS = 64, 1500
_SHORT_EVERY_S = 1.5
_LOAD_S = 75.0
_STREAMS = 4
_STREAM_TOKENS = 200
_ALONE = 1


class Engine:
    """One plain engine under test."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._prompts = Prompts(seed=13)

    def __repr__(self) -> str:
        return f"<Engine {self._url}>"

    async def _ask(self, tokens: int, output_tokens: int = 1) -> Answer:
        return await stream(self._http, self._url, completion(self._prompts.of(tokens), output_tokens))

    async def alone_s(self) -> float:
        """A long prompt when nothing else is there."""
        runs = [await self._ask(LONG_TOKENS) for _ in range(_ALONE + 1)]
        return statistics.median(run.ttft_s for run in runs[1:])

    async def queue(self) -> dict[str, Any]:
        """As a prefill worker: TTFT of short prompts among long ones, which take half of its time."""
        short: list[Answer] = []
        long: list[Answer] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(self._arrivals(LONG_TOKENS, LONG_EVERY_S, long))
            group.create_task(self._arrivals(SHORT_TOKENS, _SHORT_EVERY_S, short))
        return {
            "short_ttft": spread_ms(answer.ttft_s for answer in short),
            "long_ttft": spread_ms(answer.ttft_s for answer in long),
        }

    async def _arrivals(self, tokens: int, every_s: float, answers: list[Answer]) -> None:
        """Open loop: whoever arrives does not wait for the others."""

        async def ask() -> None:
            answers.append(await self._ask(tokens))

        end_s = time.monotonic() + _LOAD_S
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end_s:
                group.create_task(ask())
                await asyncio.sleep(self._prompts.gap_s(every_s))

    async def stall(self) -> dict[str, Any]:
        """As a decode worker: ITL of streams while the worker computes one long prompt itself."""
        streams = [asyncio.create_task(self._ask(SHORT_TOKENS, _STREAM_TOKENS)) for _ in range(_STREAMS)]
        await asyncio.sleep(3)
        long = await self._ask(LONG_TOKENS)
        begin_s, end_s = long.sent_s, long.token_s[0]
        gaps = [
            after - before
            for answer in await asyncio.gather(*streams)
            for before, after in itertools.pairwise(answer.token_s)
            if after > begin_s and before < end_s
        ]
        return {"itl": spread_ms(gaps), "long_ttft_ms": ms(long.ttft_s)}


async def _measure(setting: str, core: int, folder: Path, say: Say) -> dict[str, Any]:
    budget, shared = (int(number) for number in setting.split(","))
    wanted = config(max_batched_tokens=budget, shared_chunk_tokens=shared)
    spec = engine_spec(wanted, fetch(), port=free_port(), cpus=(core,))
    async with plain_engine(spec, folder / f"{core}.log") as server, aiohttp.ClientSession() as http:
        engine = Engine(http, server.url)
        figures = {"alone_ms": ms(await engine.alone_s()), "queue": await engine.queue(), "stall": await engine.stall()}
        say(f"{setting}: {json.dumps(figures)}")
        return figures


async def measure(settings: list[str], say: Say) -> dict[str, Any]:
    """At most two settings at once: nobody's engine shares a core."""
    with tempfile.TemporaryDirectory(prefix="chunks-") as folder:
        jobs = [_measure(setting, core, Path(folder), say) for core, setting in enumerate(settings)]
        return dict(zip(settings, await asyncio.gather(*jobs), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure waits and stalls in one engine, by chunk sizes.")
    parser.add_argument(
        "settings", nargs="*", default=list(DEFAULT), metavar="BUDGET,SHARED",
        help=f"tokens of a step, and of one prompt in it (0: all); without any: {' '.join(DEFAULT)}",
    )  # fmt: skip
    settings, say = parser.parse_args(arguments).settings, say_with_clock("chunks")
    for first in range(0, len(settings), 2):
        found = asyncio.run(measure(settings[first : first + 2], say))
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**known, "machine": describe(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
