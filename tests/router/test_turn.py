"""A latch that is opened, refused, or given up by whoever waited."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.errors import Overloaded
from kvrelay.router.turn import Turn


async def test_whoever_waits_goes_on_when_the_turn_has_come() -> None:
    turn = Turn()
    waiting = asyncio.create_task(turn.wait())
    await asyncio.sleep(0)
    turn.come()
    turn.come()
    await waiting
    assert not turn.is_given_up
    assert not turn.refuse(Overloaded("late")), "it has come"


async def test_a_turn_that_is_refused_raises_why_and_does_not_come() -> None:
    turn = Turn()
    assert turn.refuse(Overloaded("no room"))
    turn.come()
    with pytest.raises(Overloaded, match="no room"):
        await turn.wait()
    assert turn.is_given_up


async def test_whoever_hangs_up_gives_its_turn_up() -> None:
    turn = Turn()
    waiting = asyncio.create_task(turn.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    turn.come()
    assert turn.is_given_up


async def test_another_life_has_a_turn_of_its_own() -> None:
    turn = Turn()
    turn.refuse(Overloaded("no room"))
    turn.renew()
    assert not turn.is_given_up
    turn.come()
    await turn.wait()
