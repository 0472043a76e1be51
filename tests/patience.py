"""How tests wait for what other tasks, threads and processes do: for a fact, and for a promised time with leeway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 30.0
"""How long a fact is waited for. A loaded machine takes many times as long as a quiet one, and when all goes well it
costs nothing."""
CANCELLED_S = 1.0
"""Promised: so soon nobody works any more for a client that is gone, and a client has what a worker refused it."""
RECOVERED_S = 2.0
"""Promised: so soon the loss of a party is noticed and made good, with default heartbeats."""
LEEWAY = 5.0
"""How many times as long as promised a test accepts: a loaded machine is late, and a broken promise is later."""
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
