"""What a stream on D notices when another request's KV arrives: its inter-token latency, with and without."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.answers import Answer
from benchmarks.progress import Say
from benchmarks.prompts import Prompts
from benchmarks.quantiles import quantile, spread_ms
from benchmarks.split import Kvrelay
from kvrelay.types import Role

TOKENS = 1000
_STREAM_TOKENS = (64, 160)
"""Long enough to outlast the prefill of the other request."""
_LEAD_S = 0.7
"""The stream's own start is over by then."""
_QUIET_S = 5.0
"""About as long as the other request takes."""

Meanwhile = Callable[[Kvrelay, list[int]], Awaitable[object]]


async def _nothing(_service: Kvrelay, _prompt: list[int]) -> None:
    await asyncio.sleep(_QUIET_S)


async def _arriving(service: Kvrelay, prompt: list[int]) -> None:
    await service.ask(prompt, 1)


async def _computing(service: Kvrelay, prompt: list[int]) -> None:
    """The same prefill on P, whose KV goes nowhere: what the two engines cost each other on one machine."""
    await service.direct(Role.PREFILL, prompt, 1)


_CONDITIONS: dict[str, Meanwhile] = {"alone": _nothing, "arriving": _arriving, "computing": _computing}


async def measure(service: Kvrelay, rounds: int, say: Say) -> dict[str, Any]:
    """ITL of one stream under each condition, in turn, ``rounds`` times."""
    prompts = Prompts(seed=11)
    gaps: dict[str, list[float]] = {name: [] for name in _CONDITIONS}
    for _round in range(rounds):
        for name, meanwhile in _CONDITIONS.items():
            gaps[name] += await _gaps(service, prompts, meanwhile)
    figures: dict[str, Any] = {name: spread_ms(values) for name, values in gaps.items()}
    p99 = {name: quantile(values, 0.99) for name, values in gaps.items()}
    figures["ratio"] = round(p99["arriving"] / p99["alone"], 3)
    figures["ratio_to_computing"] = round(p99["arriving"] / p99["computing"], 3)
    for name, figure in figures.items():
        say(f"ITL of a stream on D, {name}: {figure}")
    return figures


async def _gaps(service: Kvrelay, prompts: Prompts, meanwhile: Meanwhile) -> list[float]:
    """Gaps between tokens that came while ``meanwhile`` ran."""
    loop = asyncio.get_running_loop()
    stream = asyncio.create_task(service.decode_only(prompts.of(_STREAM_TOKENS[0]), _STREAM_TOKENS[1]))
    await asyncio.sleep(_LEAD_S)
    begin_s = loop.time()
    await meanwhile(service, prompts.of(TOKENS))
    end_s = loop.time()
    return _between(await stream, begin_s, end_s)


def _between(answer: Answer, begin_s: float, end_s: float) -> list[float]:
    """The loop's clock and the answer's are the same monotonic one."""
    inside = [at_s for at_s in answer.token_s if begin_s <= at_s <= end_s]
    return [after - before for before, after in itertools.pairwise(inside)]
