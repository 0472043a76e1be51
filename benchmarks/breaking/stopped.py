"""The processes of a cluster, and how they stand still for a while, connections and all."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterator

import psutil

from kvrelay.deploy.local import LocalCluster


def processes(cluster: LocalCluster, *, but: Collection[str] = ()) -> dict[str, set[int]]:
    """Ids of every process of every member but some."""
    roots = {name: psutil.Process(cluster.pid(name)) for name in cluster.names if name not in but}
    return {name: {root.pid, *(child.pid for child in root.children(recursive=True))} for name, root in roots.items()}


@contextlib.contextmanager
def stopped(pid: int, *, all_of_it: bool = True) -> Iterator[None]:
    """SIGSTOP for a process and those below it. Without ``all_of_it`` it goes on itself: a supervisor's heartbeats."""
    root = psutil.Process(pid)
    tree = [*([root] if all_of_it else []), *root.children(recursive=True)]
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
                process.send_signal(signal.SIGCONT)
