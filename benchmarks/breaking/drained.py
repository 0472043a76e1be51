"""Waits until a worker that gets no new work has none left."""

from __future__ import annotations

import asyncio

from kvrelay.cli.draining import Routers


async def drained(routers: Routers, name: str) -> None:
    """Drain ``name``; return once it is empty."""
    said = await routers.drain(name)
    while not said.is_empty:
        await asyncio.sleep(0.05)
        said = await routers.remaining(name)
