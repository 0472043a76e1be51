"""Says that an answer pauses, and why, so that nobody takes a wait for the end. It must never change the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

SILENT_S = 2.0
"""Longest wait without a word. A token takes milliseconds; a router that moves an answer takes up to two seconds."""


async def told(pieces: AsyncIterator[str], tell: Callable[[float], Awaitable[None]]) -> AsyncIterator[str]:
    """``pieces``; ``tell`` is called with the seconds waited so far whenever none came for ``SILENT_S``."""
    while True:
        coming = asyncio.ensure_future(anext(pieces, None))
        try:
            await _awaited(coming, tell)
            piece = await coming
        finally:
            coming.cancel()
        if piece is None:
            return
        yield piece


async def _awaited(coming: asyncio.Future[str | None], tell: Callable[[float], Awaitable[None]]) -> None:
    waited_s = 0.0
    while not (await asyncio.wait({coming}, timeout=SILENT_S))[0]:
        waited_s += SILENT_S
        await tell(waited_s)
