"""The hand-off's figures beside those of vLLM's own, measured in one run: ``make bench-handoff``.

Stages run one after another, each with at most two engines, and each writes its figures into ``results/handoff.json``
when it is over, so that a run can be cut into pieces: ``python -m benchmarks.handoff [--quick] [STAGE ...]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import exposed, interference, load, overhead, shaped, store, wire
from benchmarks.handoff_table import render, rows
from benchmarks.peers import mooncake
from benchmarks.peers.environment import NIXL, peer_python
from benchmarks.peers.nixl import Direction, nixl
from benchmarks.progress import Say, say_with_clock
from benchmarks.results_file import keep, read
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
    peer = await asyncio.to_thread(mooncake.store, say)
    say(f"one store: {figures}, Mooncake's: {peer}")
    return {**figures, "mooncake": peer}


async def _transports(_size: Size, say: Say) -> dict[str, Any]:
    """In the environments of the peers, which have NIXL or Mooncake beside the product's packages."""
    python = peer_python("nixl", NIXL, say)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    child = await asyncio.create_subprocess_exec(
        python, "-m", "benchmarks.transports", stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        output, _ = await child.communicate()
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGTERM)  # its stores, too
    if child.returncode:
        raise RuntimeError(f"benchmarks.transports ended with {child.returncode}")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    figures["mooncake"] = await asyncio.to_thread(mooncake.engine, say)
    say(f"store to store, GB/s: {figures}")
    return figures


class Stage(NamedTuple):
    """One part of the benchmark."""

    run: Callable[[Size, Say], Coroutine[Any, Any, dict[str, Any]]]
    minutes: int
    """About how long it takes in full on two cores."""
    what: str


STAGES: dict[str, Stage] = {
    "ours": Stage(_ours, 6, "what of a hand-off a client waits for, on idle workers and under mixed load"),
    "pull": Stage(_pull, 6, "the same of vLLM's own hand-off, where D reads by NIXL (its first run installs the peer)"),
    "push": Stage(_push, 6, "the same of vLLM's own hand-off, where P writes by NIXL"),
    "overhead": Stage(_overhead, 4, "what the connector adds to a prefill and to an idle engine"),
    "stores": Stage(_stores, 4, "what crosses between two stores, when, and what a running answer notices of it"),
    "link": Stage(_link, 1, "a prefill's KV over a link of 1 Gbit/s (as root, with iproute2)"),
    "arena": Stage(_arena, 1, "put, get, push and questions of a store, beside a plain copy and Mooncake Store"),
    "transports": Stage(_transports, 1, "store to store by each transport, beside NIXL and Mooncake alone"),
}


def explain(names: Sequence[str]) -> str:
    """A line for each stage."""
    return "\n".join(f"  {name:<11}about {STAGES[name].minutes} min  {STAGES[name].what}" for name in names)


def plan(names: Sequence[str], size: Size, results: Path) -> str:
    """What is about to happen, for whoever waits for it."""
    minutes = sum(STAGES[name].minutes for name in names)
    quick = "; a quick run takes a third of that" if size is QUICK else ""
    return (
        f"Stages, about {minutes} min in all on two cores{quick}:\n{explain(names)}\n"
        f"Leave the machine idle meanwhile, or the figures mean little. Each stage that ends is written to {results}"
    )


def run(names: list[str], size: Size, results: Path) -> dict[str, Any]:
    """Run the stages and merge what they find into ``results``."""
    for name in names:
        say = say_with_clock(name)
        say("starting")
        begin_s = time.monotonic()
        figures = asyncio.run(STAGES[name].run(size, say))
        keep(results, name, {"took_s": round(time.monotonic() - begin_s), **figures})
    return read(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the hand-off beside vLLM's own, and print one table.",
        epilog=f"stages, in full:\n{explain(list(STAGES))}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="all when none is named")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, in a file of their own")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; known: {', '.join(STAGES)}")
    size, results = (QUICK, QUICK_RESULTS) if options.quick else (FULL, RESULTS)
    names = options.stages or list(STAGES)
    print(plan(names, size, results), flush=True)
    try:
        found = run(names, size, results)
    except KeyboardInterrupt:
        sys.exit(_interrupted(results))
    print(render(rows(found)))


def _interrupted(results: Path) -> int:
    """Say what is left of the run; the exit status of a process that SIGINT ended."""
    print(f"interrupted; stages that ended are in {results}", file=sys.stderr)
    return 128 + signal.SIGINT


if __name__ == "__main__":
    main()
