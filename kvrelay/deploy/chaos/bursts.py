"""Packet loss in bursts: a network that is cut and whole by turns, faster than anybody calls dead. It must never end
with the network cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvrelay.errors import Lost

CUT_S, WHOLE_S = 0.15, 0.3
"""A third of the time. Random loss needs a kernel with netem; TCP, which repeats what is lost, shows both as pauses."""


class Bursts:
    """Cuts a network again and again, from now until ``end``."""

    def __init__(self, cut: Callable[[bool], Awaitable[None]]) -> None:
        """``cut`` cuts it or makes it whole; what it raises as ``Lost`` is nobody there to cut off."""
        self._cut = cut
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def __repr__(self) -> str:
        return f"<Bursts {'over' if self._task.done() else 'running'}>"

    async def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Lost):
                await self._cut(True)
            await asyncio.sleep(CUT_S)
            with contextlib.suppress(Lost):
                await self._cut(False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WHOLE_S):
                    await self._over.wait()

    async def end(self) -> None:
        """The network is whole. Raises ``Lost``."""
        self._over.set()
        await asyncio.shield(self._task)  # not cancelled: a cut that is under way would come after what mends it
        await self._cut(False)
