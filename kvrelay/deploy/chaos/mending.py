"""Mends many things, whatever becomes of each. It must never leave one untried because another cannot be mended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kvrelay.errors import Lost
from kvrelay.types import Value

MEND_S = 20.0
"""Longest wait for one thing to be mended: whoever hangs is told like whoever refuses."""

Result = TypeVar("Result")


class Unmended(Value, frozen=True, kw_only=True):
    """Something that is still broken."""

    name: str
    why: str
    by_hand: str
    """What a person does about it."""

    def __str__(self) -> str:
        return f"{self.name} is still broken ({self.why}). To mend it by hand: {self.by_hand}"


async def mend_each(
    names: Iterable[str], mend: Callable[[str], Awaitable[None]], by_hand: Callable[[str], str]
) -> list[Unmended]:
    """``mend`` every one at the same time; those that are still broken then. ``by_hand`` is asked before."""
    ways = {name: by_hand(name) for name in names}
    answers = await asyncio.gather(*(in_time(mend(name)) for name in ways), return_exceptions=True)
    return [
        Unmended(name=name, why=str(answer) or repr(answer), by_hand=way)
        for (name, way), answer in zip(ways.items(), answers, strict=True)
        if isinstance(answer, BaseException)
    ]


async def in_time(mending: Awaitable[None]) -> None:
    """Raises ``Lost`` after ``MEND_S``."""
    try:
        async with asyncio.timeout(MEND_S):
            await mending
    except TimeoutError as error:
        raise Lost(f"nothing came of it in {MEND_S:g} s") from error


async def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """What ``work`` returns. It goes on while its caller is cancelled, which is raised after it."""
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and task.exception() is None:
        raise asyncio.CancelledError
    return task.result()
