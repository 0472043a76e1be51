"""Processor time of processes between two moments, as a share of a core."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


class Cpu:
    """Processor time that a fixed set of processes uses from now on."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = list(processes)
        self._begin_s = time.monotonic()
        self._used_s = self._total_s()

    def __repr__(self) -> str:
        return f"<Cpu of {len(self._processes)} processes>"

    @classmethod
    def of(cls, pid: int) -> Cpu:
        """One process."""
        return cls([psutil.Process(pid)])

    @classmethod
    def below(cls, pid: int) -> Cpu:
        """All descendants of a process, without itself."""
        return cls(psutil.Process(pid).children(recursive=True))

    @classmethod
    def tree(cls, pid: int) -> Cpu:
        """A process and all its descendants."""
        root = psutil.Process(pid)
        return cls([root, *root.children(recursive=True)])

    @classmethod
    def trees(cls, pids: Iterable[int]) -> Cpu:
        """Several processes, each with all its descendants."""
        roots = [psutil.Process(pid) for pid in pids]
        return cls(process for root in roots for process in (root, *root.children(recursive=True)))

    def _total_s(self) -> float:
        """The kernel counts in ticks of 10 ms: over 20 s that is 0.05 % of a core and process."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._processes))

    def used_s(self) -> float:
        """Seconds of a core since the start."""
        return self._total_s() - self._used_s

    def share(self) -> float:
        """Shares of a core since the start; 1.0 is one core, always busy."""
        return self.used_s() / (time.monotonic() - self._begin_s)
