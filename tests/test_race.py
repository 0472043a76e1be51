"""Tasks that live and die together."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from kvrelay.race import until_one_ends
from tests.patience import PATIENCE_S


class Thing:
    """Something large that a task works on."""


async def fail(thing: Thing | None = None) -> None:
    await asyncio.sleep(0.01)
    raise ZeroDivisionError(str(thing))


async def test_the_first_error_ends_the_others_and_comes_out_plain() -> None:
    ends: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("cancelled")

    with pytest.raises(ZeroDivisionError):
        await until_one_ends(forever(), fail(), forever())
    assert ends == ["cancelled"] * 2


async def test_a_part_that_returns_ends_the_others_without_error() -> None:
    await asyncio.wait_for(until_one_ends(asyncio.sleep(0), asyncio.sleep(600)), PATIENCE_S)


async def test_a_cancelled_race_ends_all_its_parts() -> None:
    ends: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("cancelled")

    task = asyncio.create_task(until_one_ends(forever(), forever()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends == ["cancelled"] * 2


async def test_nothing_that_a_part_worked_on_outlives_the_error() -> None:
    thing = Thing()
    alive = weakref.ref(thing)
    gc.disable()
    try:
        try:
            await until_one_ends(fail(thing), asyncio.sleep(60))
        except ZeroDivisionError:
            del thing
        assert alive() is None
    finally:
        gc.enable()
