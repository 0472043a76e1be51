"""How right the router's predictions are on real engines: one P and one D, from a router that knows nothing.

Run:  python -m benchmarks.prediction        (SmolLM2 on two cores; two minutes)
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import describe
from benchmarks.progress import Say, say_with_clock
from benchmarks.prompts import Prompts
from benchmarks.split import Kvrelay, config, kvrelay
from kvrelay.config import RouterConfig

LENGTHS = (24, 96, 300, 900)
ROUNDS = 14
"""Rounds of every length once, one request at a time; afterwards two at a time."""
PAIRS = 8
OUTPUT_TOKENS = 12
LEARNING = 40
"""Requests after which predictions have to hold."""
RESULTS = Path(__file__).parent / "results" / "prediction.json"


async def one(service: Kvrelay, prompt: Sequence[int]) -> dict[str, Any]:
    """What was predicted of one request, and what happened."""
    handed = await service.ask(prompt, OUTPUT_TOKENS)
    report = await service.report(handed.answer)
    decision, actual = report["decision"][0], report["actual"]
    return {
        "tokens": len(prompt),
        "path": report["path"],
        "predicted_s": decision["ttft_s"],
        "ttft_s": actual["ttft_s"],
        "predicted_tpot_s": decision["tpot_s"],
        "tpot_s": actual["tpot_s"],
    }


async def measure(say: Say) -> list[dict[str, Any]]:
    """All requests in order."""
    prompts, rows = Prompts(11), list[dict[str, Any]]()
    router = RouterConfig(port=0, control_port=0)
    async with kvrelay(msgspec.structs.replace(config(), router=router)) as service:
        for number in range(ROUNDS):
            rows += [await one(service, prompts.of(tokens)) for tokens in LENGTHS]
            say(f"round {number + 1} of {ROUNDS}: {rows[-1]}")
        for number in range(PAIRS):
            pair = (prompts.of(LENGTHS[number % 4]), prompts.of(LENGTHS[(number + 1) % 4]))
            rows += await asyncio.gather(*(one(service, prompt) for prompt in pair))
    return rows


def error(rows: Sequence[dict[str, Any]], predicted: str, seen: str) -> float:
    """Median of the relative errors."""
    errors = [abs(float(row[predicted]) / float(row[seen]) - 1) for row in rows]
    return round(statistics.median(errors), 3)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by how much the router had seen."""
    alone = len(LENGTHS) * ROUNDS
    parts = {"first_20": rows[:20], "after_40": rows[LEARNING:alone], "two_at_a_time": rows[alone:]}
    return {
        name: {
            "requests": len(part),
            "local": sum(row["path"] == "local" for row in part),
            "ttft_error": error(part, "predicted_s", "ttft_s"),
            "tpot_error": error(part, "predicted_tpot_s", "tpot_s"),
        }
        for name, part in parts.items()
    }


def main() -> None:
    rows = asyncio.run(measure(say_with_clock("prediction")))
    found = {"machine": describe(), **summary(rows), "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for name, part in summary(rows).items():
        print(f"{name:>14}: {part}")


if __name__ == "__main__":
    main()
