"""Runs a stock vLLM server with its NIXL connector, tuned for a small machine.

Stock, the connector pins every engine of a node to the node's last core, so that P and D share one, and the progress
thread of UCX spins. Here an engine stays on its own core, and the progress thread sleeps a millisecond between rounds.
vLLM spawns its processes by importing this module again: what stands outside the guard runs in each of them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

from kvrelay.deploy.engine_main import CPUS_VARIABLE, main
from kvrelay.deploy.parent import die_with_parent

PROGRESS_DELAY_US = 1000


def stay_on_own_cores() -> None:
    """Pin this process to its engine's cores, and let nobody move it."""
    os.sched_setaffinity(0, {int(cpu) for cpu in os.environ[CPUS_VARIABLE].split(",")})

    def keep(pid: int, mask: Iterable[int], /) -> None:
        print(f"peer: process {pid} stays where it is, not on {sorted(mask)}", file=sys.stderr, flush=True)

    os.sched_setaffinity = keep


def slow_progress_thread() -> None:
    """Make every NIXL agent's progress thread rest between its rounds."""
    import nixl_cu12._bindings as bindings  # type: ignore[import-not-found]

    class Slowed(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Slowed


if __name__ in ("__main__", "__mp_main__"):
    stay_on_own_cores()
    slow_progress_thread()
if __name__ == "__mp_main__":
    die_with_parent(os.getppid(), signal.SIGKILL)
if __name__ == "__main__":
    main()
