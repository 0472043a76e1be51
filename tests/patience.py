"""How tests wait for what other tasks, threads and processes do: for a fact, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 30.0
"""How long a fact is waited for. A loaded machine takes many times as long as a quiet one, and when all goes well it
costs nothing."""
LATE = "it did not happen in time"


async def until(check: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until ``check`` holds; it is asked on the event loop."""
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, LATE
        await asyncio.sleep(0.005)


async def until_on_thread(check: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until ``check`` holds; it is asked on a thread, since it blocks."""
    end = time.monotonic() + within_s
    while not await asyncio.to_thread(check):
        assert time.monotonic() < end, LATE
        await asyncio.sleep(0.01)


def wait_until(check: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Block until ``check`` holds."""
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, LATE
        time.sleep(0.005)
