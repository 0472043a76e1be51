"""What deaths cost: pauses, answers that are lost or changed, time until all is known again.

``python -m benchmarks.recovery [--quick] [STAGE ...]`` runs the stages and writes ``results/recovery.json``. Engines
are simulated, but for the stages ``engines``, ``replay``, ``restarts`` and ``partitions``; routers, links, journals
and hand-overs are real. Times are of an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec

from benchmarks.breaking.stages import STAGES
from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results" / "recovery.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer rounds; nothing is written")
    options.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; all without")
    given = options.parse_args()
    results = msgspec.json.decode(RESULTS.read_bytes()) if RESULTS.exists() else {}
    results["machine"] = describe()
    for name in given.stages or STAGES:
        results[name] = asyncio.run(STAGES[name](given.quick))
        print(name, msgspec.json.format(msgspec.json.encode(results[name])).decode(), flush=True)
        if not given.quick:
            RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


if __name__ == "__main__":
    main()
