"""The mixed load on real engines, beside vLLM unsplit and vLLM's own split, in one run: ``make bench-mixed``.

Short prompts with long answers want their first token soon and no gaps; long prompts keep coming between them. Stages
run one after another, each with two engines, and each writes its figures into ``results/mixed.json`` when it is over:
``python -m benchmarks.mixed [--quick] [STAGE ...]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks import load
from benchmarks.handoff_table import Row, render
from benchmarks.peers.colocated import SMALL_BUDGET_TOKENS, VLLM_BUDGET_TOKENS, colocated
from benchmarks.peers.nixl import Direction, nixl
from benchmarks.progress import Say, say_with_clock
from benchmarks.results_file import Found, keep, read
from benchmarks.split import config, kvrelay
from kvrelay.config import RouterConfig

RESULTS = Path(__file__).parent / "results" / "mixed.json"
QUICK_RESULTS = Path(__file__).parent / "results" / "mixed-quick.json"
LOAD_S, QUICK_LOAD_S = 75.0, 30.0
OURS = "kvrelay"

Started = Callable[[Say], contextlib.AbstractAsyncContextManager[load.Service]]


def _ours(_say: Say) -> contextlib.AbstractAsyncContextManager[load.Service]:
    """As ``kvrelay up`` starts it: where a prompt is computed is the router's choice."""
    return kvrelay(msgspec.structs.replace(config(), router=RouterConfig(port=0, control_port=0)))


STAGES: dict[str, Started] = {
    OURS: _ours,
    "colocated": lambda _say: colocated(VLLM_BUDGET_TOKENS),
    "colocated-small": lambda _say: colocated(SMALL_BUDGET_TOKENS),
    "nixl": lambda say: nixl(Direction.PULL, say),
}


def rows(found: Found) -> list[Row]:
    """Ours beside the peers that were measured."""
    stages = {name: found[name] for name in STAGES if name in found}
    return list(_rows(stages)) if OURS in stages else []


def _rows(stages: Found) -> Iterator[Row]:
    for what, spread, percentile, most_s in (
        ("short prompts' TTFT p50", "stream_ttft", "p50_ms", 0.25),
        ("short prompts' ITL p99.9", "stream_itl", "p999_ms", 0.15),
    ):
        seconds = {name: found[spread][percentile] / 1e3 for name, found in stages.items()}
        yield Row(
            what=what,
            peer=_peers(seconds, "s"),
            ours=f"{seconds[OURS]:.2f} s",
            target=f"<= {most_s} s",
            met=seconds[OURS] <= most_s,
        )
    speeds = {name: float(found["tokens_per_s"]) for name, found in stages.items()}
    if len(speeds) > 1:
        best = max(speed for name, speed in speeds.items() if name != OURS)
        yield Row(
            what="tokens written",
            peer=_peers(speeds, "tokens/s"),
            ours=f"{speeds[OURS]:g} tokens/s",
            target="the best peer's x .95",
            met=speeds[OURS] >= 0.95 * best,
        )


def _peers(figures: dict[str, float], unit: str) -> str:
    known = [f"{name} {figure:.2f}" for name, figure in figures.items() if name != OURS]
    return f"{', '.join(known)} {unit}" if known else "-"


def run(names: Sequence[str], load_s: float, results: Path) -> Found:
    """Run the stages and merge what they find into ``results``."""
    for name in names:
        keep(results, name, asyncio.run(_stage(name, load_s)))
    return read(results)


async def _stage(name: str, load_s: float) -> Found:
    say = say_with_clock(name)
    say("starting")
    async with STAGES[name](say) as service:
        return await load.measure(service, load_s, say)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the mixed load on real engines, and print one table.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"all when none is named: {' '.join(STAGES)}")
    parser.add_argument("--quick", action="store_true", help="shorter, in a results file of its own")
    options = parser.parse_args()
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; known: {', '.join(STAGES)}")
    load_s, results = (QUICK_LOAD_S, QUICK_RESULTS) if options.quick else (LOAD_S, RESULTS)
    print(render(rows(run(options.stages or list(STAGES), load_s, results))))


if __name__ == "__main__":
    main()
