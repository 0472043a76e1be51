"""What of a hand-off idle workers wait for: P's response to D's first token, less a one-token prompt on D."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.progress import Say
from benchmarks.prompts import Prompts
from benchmarks.quantiles import ms
from benchmarks.split import Handed, Split

_OUTPUT_TOKENS = 8
_FLOORS_A_ROUND = 3


async def measure(split: Split, lengths: Sequence[int], rounds: int, say: Say) -> dict[str, Any]:
    """Medians of ``rounds`` prompts of each length that share nothing, one at a time.

    One-token prompts are asked in the same rounds: what else the machine does at the time slows both.
    """
    prompts = Prompts(seed=1)
    await split.ask(prompts.of(lengths[0]), _OUTPUT_TOKENS)  # the first hand-off makes connections
    figures: dict[str, Any] = {}
    for tokens in lengths:
        runs, floors_s = [], []
        for _round in range(rounds):
            runs.append(await split.ask(prompts.of(tokens), _OUTPUT_TOKENS))
            floors_s += [await _floor_s(split, prompts) for _ in range(_FLOORS_A_ROUND)]
        figures[str(tokens)] = _row(runs, statistics.median(floors_s))
        say(f"{tokens} tokens: {figures[str(tokens)]}")
    return figures


async def _floor_s(split: Split, prompts: Prompts) -> float:
    """First token of a prompt that needs no hand-off: with one token vLLM computes as much as after a load."""
    return (await split.decode_only(prompts.of(1), _OUTPUT_TOKENS)).ttft_s


def _row(runs: list[Handed], floor_s: float) -> dict[str, Any]:
    gaps = [run.gap_s for run in runs if run.gap_s is not None]
    prefills = [run.prefill_s for run in runs if run.prefill_s is not None]
    gap_s = statistics.median(gaps)
    return {
        "n": len(gaps),
        "prefill_ms": ms(statistics.median(prefills)),
        "floor_ms": ms(floor_s),
        "gap_ms": ms(gap_s),
        "gaps_ms": [ms(gap) for gap in gaps],
        "exposed_ms": ms(gap_s - floor_s),
    }
