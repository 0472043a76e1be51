"""What tests ask of processes."""

from __future__ import annotations

import asyncio
import time

import psutil

from tests.patience import PATIENCE_S


def tree(pid: int) -> list[psutil.Process]:
    """The process ``pid`` and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


async def all_dead(processes: list[psutil.Process], within_s: float = PATIENCE_S) -> bool:
    """Whether ``processes`` end in time."""
    end = time.monotonic() + within_s
    while any(map(_lives, processes)):
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


def _lives(process: psutil.Process) -> bool:
    """A zombie that init has not looked at yet is dead."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mapped(process: psutil.Process) -> set[str]:
    """Files in /dev/shm that a process maps."""
    return {region.path for region in process.memory_maps() if region.path.startswith("/dev/shm/")}
