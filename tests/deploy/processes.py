"""What tests ask of processes."""

from __future__ import annotations

import asyncio

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process ``pid`` and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


async def all_dead(processes: list[psutil.Process], within_s: float = 5.0) -> bool:
    """Whether ``processes`` end in time; a zombie that init has not looked at yet is dead."""
    _gone, rest = await asyncio.to_thread(psutil.wait_procs, processes, within_s)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in rest)


def mapped(process: psutil.Process) -> set[str]:
    """Files in /dev/shm that a process maps."""
    return {region.path for region in process.memory_maps() if region.path.startswith("/dev/shm/")}
