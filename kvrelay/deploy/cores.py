"""Which cores each engine of this machine gets. Engines spin, so two on one core would halve each other."""

from __future__ import annotations

import os

from kvrelay.errors import Misconfigured


def available() -> tuple[int, ...]:
    """Cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def parse(text: str) -> tuple[int, ...]:
    """``0-2,5`` -> (0, 1, 2, 5). Raises ``Misconfigured``."""
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            cores += range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        raise Misconfigured(f"worker.cpus is {text!r}; write cores like 0, 0-3 or 0,2") from error
    if not cores:
        raise Misconfigured(f"worker.cpus is {text!r}: an empty range; write cores like 0, 0-3 or 0,2")
    return tuple(cores)


def ranges(cores: tuple[int, ...]) -> str:
    """``cores`` as people write them: (0, 1, 2, 5) -> ``0-2,5``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def share(cores: tuple[int, ...], engines: int) -> list[tuple[int, ...]]:
    """Split ``cores`` into ``engines`` equal runs; with more engines than cores they take turns.

    From four cores on, the last one is left to the router and the stores.
    """
    if engines <= 0:
        return []
    return deal(cores[:-1] if len(cores) >= 4 and len(cores) > engines else cores, engines)


def deal(cores: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Split ``cores`` into ``parts`` equal runs, for engines or the ranks of one; short of cores they take turns."""
    each = len(cores) // parts
    if each == 0:
        return [(cores[index % len(cores)],) for index in range(parts)]
    return [cores[index * each : (index + 1) * each] for index in range(parts)]
