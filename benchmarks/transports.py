"""Speeds of all transports as JSON on stdout. Runs in the environment of a peer, which has NIXL."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from benchmarks import links, sockets
from benchmarks.links import LOADS, Load, measured_s
from kvrelay.types import Transport

ONE_STREAM = "tcp, one stream"
SOCKETS = "sockets and checksums alone"


def speeds(load: Load) -> dict[str, float]:
    """Median GB/s of each transport, store to store, and of plain sockets and NIXL alone."""
    seconds = {SOCKETS: sockets.raw_tcp(load, verify=True), ONE_STREAM: measured_s(Transport.TCP, load, streams=1)}
    seconds |= {str(transport): measured_s(transport, load) for transport in links.TRANSPORTS}
    if Transport.NIXL in links.TRANSPORTS:
        seconds["NIXL alone"] = links.raw_nixl(load)
    return {name: gb_per_s(load, each) for name, each in seconds.items()}


def gb_per_s(load: Load, seconds: Sequence[float]) -> float:
    """At the median of ``seconds``."""
    return round(load.size_bytes / statistics.median(seconds) / 1e9, 2)


def main() -> None:
    print(json.dumps({load.what: speeds(load) for load in LOADS}))


if __name__ == "__main__":
    main()
