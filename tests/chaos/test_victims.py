"""Processes that are stopped and killed by their names."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from kvrelay.deploy.chaos.processes import ProcessVictims
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost
from tests.patience import until

NAME = f"chaos-test-worker-{os.getpid()}"


@pytest.fixture
async def process() -> AsyncIterator[psutil.Process]:
    """Something that was started like a worker."""
    code = "import time; time.sleep(600)"
    command = (sys.executable, "-c", code, "kvrelay", "worker", "--name", NAME, "--role", "decode")
    child = await asyncio.create_subprocess_exec(*command)
    yield psutil.Process(child.pid)
    if child.returncode is None:
        child.kill()
    await child.wait()


async def test_a_process_is_found_stopped_and_goes_on(process: psutil.Process) -> None:
    victims = ProcessVictims([Deed.STOP])
    assert Target(name=NAME, kind="decode", deeds=(Deed.STOP,)) in await victims.targets()
    await victims.hurt(NAME, Deed.STOP)
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    await victims.mend(NAME)
    await until(lambda: process.status() != psutil.STATUS_STOPPED)


async def test_a_killed_process_is_gone_and_mending_it_harms_nobody(process: psutil.Process) -> None:
    victims = ProcessVictims([Deed.KILL])
    await victims.hurt(NAME, Deed.KILL)
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    await victims.mend(NAME)
    with pytest.raises(Lost, match="no process is called"):
        await victims.hurt("chaos-test-nobody", Deed.KILL)
