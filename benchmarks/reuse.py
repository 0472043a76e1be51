"""How much of public traces' prompts is found again: in one LRU cache, as the router's index foretells it, and in a
fleet whose requests go where the router's own code sends them, beside Dynamo's simulator: ``make bench-reuse``.

    python -m benchmarks.reuse [--traces FOLDER] [STAGE ...]

FOLDER, else ``KVRELAY_TRACES``, holds Mooncake's traces (FAST'25), ``conversation_trace.jsonl`` and
``synthetic_trace.jsonl``, which are not ours to give: ``TRACES_FROM`` says where they are. Each stage adds its figures
to ``results/reuse.json``; none depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.handoff_table import Row, render
from benchmarks.peers import dynosim
from benchmarks.peers.environment import peer_python
from benchmarks.progress import Say, say_with_clock
from benchmarks.replay.engine import TracedEngine, worker
from benchmarks.replay.fleet import Outcome, TracedFleet
from benchmarks.replay.front import Front, RoundRobin, Routed
from benchmarks.replay.lru import UNLIMITED, foretell
from benchmarks.replay.trace import BLOCK_TOKENS, TracedRequest, read_trace, spread_s, traced_s
from benchmarks.results_file import Found, keep, read

RESULTS = Path(__file__).parent / "results" / "reuse.json"
TRACES_FROM = "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces"
NAMES = ("conversation", "synthetic")
WORKERS = 8
BLOCKS = 5_859
LRU_BLOCKS = (1_000, 5_859, 10_000, 19_531, 50_000, UNLIMITED)
LEAST = {"conversation": 0.300, "synthetic": 0.6205}
"""What our router is to find again, by trace."""
ROUTED, PEER, TURNS = "routed", "dynosim", "round-robin"

Traces = dict[str, Path]
Made = Callable[[Sequence[TracedEngine]], Front]


def find_traces(folder: Path) -> Traces:
    """Those that are there, by name."""
    found = {name: sorted(folder.glob(f"*{name}_trace.jsonl")) for name in NAMES}
    return {name: paths[0] for name, paths in found.items() if paths}


# ---------------------------------------------------------------- stages


def replay(trace: Sequence[TracedRequest], front: Made, *, spread: bool) -> Outcome:
    """``spread``: the requests of one tick of the trace come one after the other."""
    engines = [TracedEngine(worker(f"worker-{number}", BLOCKS)) for number in range(WORKERS)]
    return TracedFleet(engines, front(engines)).replay(trace, (spread_s if spread else traced_s)(trace))


def _in_turn(engines: Sequence[TracedEngine]) -> Front:
    return RoundRobin([engine.info for engine in engines])


def _routed(traces: Traces, say: Say) -> Found:
    return {"as traced": _fleet(traces, Routed, say), "spread": _fleet(traces, Routed, say, spread=True)}


def _round_robin(traces: Traces, say: Say) -> Found:
    return {"as traced": _fleet(traces, _in_turn, say)}


def _fleet(traces: Traces, front: Made, say: Say, *, spread: bool = False) -> dict[str, Any]:
    found = {}
    for name, path in traces.items():
        found[name] = replay(read_trace(path), front, spread=spread).figures()
        say(f"{name}{', spread' if spread else ''}: {found[name]}")
    return found


def _dynosim(traces: Traces, say: Say) -> Found:
    python = peer_python("dynosim", dynosim.PACKAGES, say)
    return {
        title: {name: _simulated(python, path, router) for name, path in traces.items()}
        for title, router in (("as traced", "kv_router"), ("as traced, round robin", "round_robin"))
    }


def _simulated(python: Path, path: Path, router: str) -> dict[str, float]:
    command = [str(python), dynosim.__file__, str(path), str(WORKERS), str(BLOCKS), str(BLOCK_TOKENS), router]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def _lru(traces: Traces, say: Say) -> Found:
    found: Found = {}
    for name, path in traces.items():
        trace = read_trace(path)
        for blocks in LRU_BLOCKS:
            hits, total = foretell(trace, blocks)
            size = "unlimited" if blocks == UNLIMITED else f"{blocks} blocks"
            found.setdefault(name, {})[size] = {"hit_tokens": hits, "tokens": total}
            say(f"{name}, {size}: {hits:,} of {total:,} tokens ({hits / total:.2%})")
    return found


STAGES: dict[str, Callable[[Traces, Say], Found]] = {
    "lru": _lru,
    TURNS: _round_robin,
    ROUTED: _routed,
    PEER: _dynosim,
}


# ---------------------------------------------------------------- the table


def rows(found: Found) -> Iterator[Row]:
    """Ours beside the peer's, where both or ours alone are known."""
    ours, peer = found.get(ROUTED, {}).get("as traced", {}), found.get(PEER, {}).get("as traced", {})
    for name, least in LEAST.items():
        if name in ours:
            reuse = ours[name]["reuse"]
            yield Row(
                what=f"prompt tokens found again, {name}, {WORKERS} workers of {BLOCKS:,} blocks",
                peer=f"{peer[name]['reuse']:.4f}" if name in peer else "-",
                ours=f"{reuse:.4f}",
                target=f">= {least}",
                met=reuse >= least,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Replay public traces, and print one table.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"all when none is named: {' '.join(STAGES)}")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="else KVRELAY_TRACES; the traces are Mooncake's")
    options = parser.parse_args(arguments)
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; known: {', '.join(STAGES)}")
    folder = options.traces or Path(os.environ.get("KVRELAY_TRACES", ""))
    traces = find_traces(folder) if str(folder) != "." else {}
    if not traces:
        parser.error(
            f"no traces: get conversation_trace.jsonl and synthetic_trace.jsonl from {TRACES_FROM} "
            "and name their folder with --traces FOLDER or KVRELAY_TRACES"
        )
    for name in options.stages or STAGES:
        keep(RESULTS, name, STAGES[name](traces, say_with_clock(name)))
    print(render(list(rows(read(RESULTS)))))


if __name__ == "__main__":
    main()
