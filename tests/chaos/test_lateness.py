"""Clients that are held up say so."""

from __future__ import annotations

import asyncio

from kvrelay.deploy.chaos.lateness import EVERY_S, Lateness
from tests.patience import until


async def test_a_process_that_is_held_up_knows_for_how_long() -> None:
    loop = asyncio.get_running_loop()
    async with Lateness() as late:
        held_until_s = loop.time() + 3 * EVERY_S
        await asyncio.sleep(0)  # its first look is awaited from now on
        while loop.time() < held_until_s:
            pass
        await until(lambda: late.worst_s > EVERY_S)
    assert late._looking is not None
    assert late._looking.done()
