"""What crosses between two stores, and when: the share left when a prefill ends, and the share of a warm prompt."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from benchmarks.progress import Say
from benchmarks.prompts import Prompts
from benchmarks.quantiles import ms
from benchmarks.split import Kvrelay

TOKENS = 3000
_RECORDED_S = 0.3
"""The last milestones of a transfer reach the router after the answer."""


async def measure(service: Kvrelay, rounds: int, say: Say) -> dict[str, Any]:
    """Prompts of 3,000 tokens, each asked twice; from the router's records of their transfers."""
    prompts = Prompts(seed=3)
    rows = [await _one(service, prompts.of(TOKENS)) for _ in range(rounds)]
    for row in rows:
        say(f"{TOKENS} tokens over two stores: {row}")
    return {"n": len(rows), **{name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}}


async def _one(service: Kvrelay, prompt: list[int]) -> dict[str, float]:
    cold, warm = await _report(service, prompt), await _report(service, prompt)
    moved, events = cold["transfer"], cold["events"]
    return {
        "cold_bytes": moved["bytes"],
        "left_share": moved["late_bytes"] / moved["bytes"],
        "arrived_after_answer_ms": ms(events["arrived"] - events["prefill_finished"]),
        "warm_share": warm["transfer"]["bytes"] / moved["bytes"],
    }


async def _report(service: Kvrelay, prompt: list[int]) -> dict[str, Any]:
    """What the router keeps of one request, once nothing of it is on its way any more."""
    handed = await service.ask(prompt, 1)
    await asyncio.sleep(_RECORDED_S)
    return await service.report(handed.answer)
