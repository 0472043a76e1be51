"""Processes that are stopped and killed by their names."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable

import psutil
import pytest

from kvrelay.deploy.chaos import network
from kvrelay.deploy.chaos.network import NetworkVictims
from kvrelay.deploy.chaos.processes import ProcessVictims
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.deploy.chaos.victims import MockVictims
from kvrelay.deploy.mock.faults import Faults
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


# ---------------------------------------------------------------- two mend the same thing

BURSTING = "d0"


class StillMocks(MockVictims):
    """They answer at once, whatever is done to them."""

    def __init__(self) -> None:
        super().__init__(None, "http://127.0.0.1:1", "k")  # type: ignore[arg-type]

    async def give(self, name: str, faults: Faults) -> None:
        await asyncio.sleep(0)


class StillNetwork(NetworkVictims):
    """No device of it is there any more."""

    async def _devices(self, name: str) -> list[str]:
        return []


@pytest.mark.parametrize("made", [StillMocks, lambda: StillNetwork(kills=False)], ids=["mocks", "network"])
async def test_what_two_mend_at_the_same_time_is_mended(
    made: Callable[[], StillMocks | StillNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "why_not", lambda: "")
    victims = made()
    await victims.hurt(BURSTING, Deed.LOSS)
    await asyncio.gather(victims.mend(BURSTING), victims.mend(BURSTING))
    assert not victims._bursts
