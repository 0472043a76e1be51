"""Tasks that live and die together. It must never leave one running, nor swallow why the first one ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run ``parts`` until the first one returns or raises; end the others; raise what the first one raised.

    Not a TaskGroup: callers want to catch a plain ``Lost``, not a group of them.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    ended = [task for task in tasks if task in done]
    # An error that leaves here keeps this frame: without its tasks, or they would keep one another alive, and with
    # them what they worked on, such as a mapped arena.
    tasks, done, task = [], set(), None  # type: ignore[assignment]
    while ended:
        ended.pop(0).result()
