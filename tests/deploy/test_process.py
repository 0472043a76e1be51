"""Tests of deploy/process.py and deploy/parent.py, with real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvrelay.deploy.process import Child, describe_exit
from tests.deploy.processes import all_dead
from tests.patience import PATIENCE_S

PARENT = """
import subprocess, sys, time
from multiprocessing import shared_memory
ignore = {ignore}
if ignore:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=4096)
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session={own_session})
print(inner.pid, memory.name, flush=True)
time.sleep(600)
"""


async def start(*, ignore: bool = False, own_session: bool = False) -> tuple[Child, int, Path]:
    """A child with a grandchild and a shared memory file."""
    code = PARENT.format(ignore=ignore, own_session=own_session)
    child = await Child.start("parent", [sys.executable, "-c", code], os.environ, asyncio.subprocess.PIPE)
    assert child.output is not None
    pid, memory = (await child.output.readline()).split()
    return child, int(pid), Path("/dev/shm") / memory.decode()


async def is_gone(pid: int) -> bool:
    """Whether it ends."""
    try:
        return await all_dead([psutil.Process(pid)])
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("own_session", [False, True])
async def test_kill_takes_the_whole_tree_and_its_shared_memory(own_session: bool) -> None:
    child, grandchild, memory = await start(own_session=own_session)
    assert memory.exists()
    await child.kill()
    assert not child.running
    assert child.exit_status == -signal.SIGKILL
    assert await is_gone(grandchild)
    assert not memory.exists()


async def test_stop_takes_the_tree_of_a_child_that_ends_by_itself() -> None:
    child, grandchild, memory = await start()
    await asyncio.wait_for(child.stop(grace_s=10 * PATIENCE_S), PATIENCE_S)
    assert await is_gone(grandchild)
    assert not memory.exists()


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    child, grandchild, memory = await start(ignore=True)
    started = time.monotonic()
    await asyncio.wait_for(child.stop(grace_s=0.5), PATIENCE_S)
    assert time.monotonic() - started >= 0.5
    assert child.exit_status == -signal.SIGKILL
    assert await is_gone(grandchild)
    assert not memory.exists()


async def test_stopping_a_dead_child_still_takes_what_it_left() -> None:
    child, grandchild, memory = await start()
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    await child.stop(grace_s=1)
    assert await is_gone(grandchild)
    assert not memory.exists()


async def test_a_tree_is_taken_whole_even_when_there_is_no_descriptor_left_to_watch_it_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child, grandchild, memory = await start()
    await child.stop(grace_s=10)
    assert not child.running
    assert await is_gone(grandchild)
    assert not memory.exists()


async def test_a_child_dies_with_a_starter_that_is_killed() -> None:
    code = textwrap.dedent(
        """
        import asyncio, os, sys
        from kvrelay.deploy.process import Child
        inner = ("import time; from kvrelay.deploy.parent import die_with_starter; die_with_starter();"
                 "print('up', flush=True); time.sleep(600)")
        async def main():
            child = await Child.start("inner", [sys.executable, "-c", inner], os.environ, asyncio.subprocess.PIPE)
            await child.output.readline()
            print(child.pid, flush=True)
            await child.wait()
        asyncio.run(main())
        """
    )
    child = await Child.start("starter", [sys.executable, "-c", code], os.environ, asyncio.subprocess.PIPE)
    assert child.output is not None
    inner = int(await child.output.readline())
    os.kill(child.pid, signal.SIGKILL)
    assert await is_gone(inner)
    await child.stop(grace_s=1)


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(None) == "running"


async def test_a_stop_that_is_cut_short_kills_at_once_and_leaves_nothing() -> None:
    child, grandchild, memory = await start(ignore=True)
    stopping = asyncio.create_task(child.stop(grace_s=10 * PATIENCE_S))
    await asyncio.sleep(0.2)
    assert child.running
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(stopping, PATIENCE_S)
    assert not child.running
    assert await is_gone(grandchild)
    assert not memory.exists()
