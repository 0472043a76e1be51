"""The hand-off's figures beside those of vLLM's own, measured in one run: ``make bench-handoff``.

Stages run one after another, each with at most two engines, and each writes its figures into ``results/handoff.json``
when it is over, so that a run can be cut into pieces: ``python -m benchmarks.handoff [--quick] [STAGE ...]``.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks import exposed, interference, load, overhead, shaped, store, wire
from benchmarks.handoff_table import render, rows
from benchmarks.machine import describe
from benchmarks.peers.environment import NIXL, peer_python
from benchmarks.peers.nixl import Direction, nixl
from benchmarks.progress import Say, say_with_clock
from benchmarks.split import Split, config, kvrelay
from kvrelay.types import Value

RESULTS = Path(__file__).parent / "results" / "handoff.json"
QUICK_RESULTS = Path(__file__).parent / "results" / "handoff-quick.json"


class Size(Value, frozen=True, kw_only=True):
    """How much is measured."""

    lengths: tuple[int, ...] = (256, 1024, 3000)
    rounds: int = 5
    load_s: float = 100.0
    overhead_lengths: tuple[int, ...] = (512, 2048)
    overhead_rounds: int = 5
    wire_rounds: int = 3
    interference_rounds: int = 6
    idle_s: float = 20.0


FULL = Size()
QUICK = Size(
    lengths=(256, 1024),
    rounds=3,
    load_s=30.0,
    overhead_lengths=(512,),
    overhead_rounds=4,
    wire_rounds=1,
    interference_rounds=1,
    idle_s=10.0,
)


async def _both(split: Split, size: Size, say: Say) -> dict[str, Any]:
    """What is measured of ours and of the peers alike."""
    idle = await exposed.measure(split, size.lengths, size.rounds, say)
    return {"exposed": idle, "load": await load.measure(split, size.load_s, say)}


async def _ours(size: Size, say: Say) -> dict[str, Any]:
    async with kvrelay(config()) as service:
        return await _both(service, size, say)


async def _pull(size: Size, say: Say) -> dict[str, Any]:
    async with nixl(Direction.PULL, say) as service:
        return await _both(service, size, say)


async def _push(size: Size, say: Say) -> dict[str, Any]:
    async with nixl(Direction.PUSH, say) as service:
        return await _both(service, size, say)


async def _overhead(size: Size, say: Say) -> dict[str, Any]:
    async with overhead.engines() as pair:
        prefills = await overhead.prefills(pair, size.overhead_lengths, size.overhead_rounds, say)
        return {"prefill": prefills, "idle": await overhead.idle(pair, size.idle_s, say)}


async def _stores(size: Size, say: Say) -> dict[str, Any]:
    async with kvrelay(config(stores=2, max_batched_tokens=512)) as service:
        crossing = await wire.measure(service, size.wire_rounds, say)
        return {"wire": crossing, "itl": await interference.measure(service, size.interference_rounds, say)}


async def _link(_size: Size, say: Say) -> dict[str, Any]:
    figures = await asyncio.to_thread(shaped.measure)
    say(f"link of 1 Gbit/s: {figures}")
    return figures


async def _arena(_size: Size, say: Say) -> dict[str, Any]:
    taken_s = await asyncio.to_thread(store.measure)
    figures = {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in taken_s.items()}
    say(f"one store: {figures}")
    return figures


async def _transports(_size: Size, say: Say) -> dict[str, Any]:
    """In the peer's environment, which has NIXL beside the product's packages."""
    python = peer_python("nixl", NIXL, say)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    child = await asyncio.create_subprocess_exec(
        python, "-m", "benchmarks.transports", stdout=asyncio.subprocess.PIPE, env=environment
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"benchmarks.transports ended with {child.returncode}")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    say(f"store to store, GB/s: {figures}")
    return figures


Stage = Callable[[Size, Say], Coroutine[Any, Any, dict[str, Any]]]

STAGES: dict[str, Stage] = {
    "ours": _ours,
    "pull": _pull,
    "push": _push,
    "overhead": _overhead,
    "stores": _stores,
    "link": _link,
    "arena": _arena,
    "transports": _transports,
}


def run(names: list[str], size: Size, results: Path) -> dict[str, Any]:
    """Run the stages and merge what they find into ``results``."""
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for name in names:
        say = say_with_clock(name)
        say("starting")
        begin_s = time.monotonic()
        figures = asyncio.run(STAGES[name](size, say))
        took_s = round(time.monotonic() - begin_s)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found["machine"] = describe()
        found[name] = {"measured": now, "took_s": took_s, **figures}
        results.parent.mkdir(exist_ok=True)
        results.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the hand-off beside vLLM's own, and print one table.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; all when none is named")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, in a file of their own")
    options = parser.parse_args()
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; known: {', '.join(STAGES)}")
    size, results = (QUICK, QUICK_RESULTS) if options.quick else (FULL, RESULTS)
    found = run(options.stages or list(STAGES), size, results)
    print(render(rows(found)))


if __name__ == "__main__":
    main()
