"""One child process in its own session: started, watched, ended with everything below it.

It must never leave a descendant or a shared memory file behind, whoever dies first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from kvrelay.deploy.parent import PARENT_VARIABLE

_POLL_S = 0.02
_REAP_S = 5.0
"""A process in an uninterruptible system call outlives its SIGKILL by so long at most; then it is left alone."""
_TRACKER_S = 1.0
"""Time for a resource tracker to remove files."""


class Child:
    """A running child process. ``stop`` is gentle, ``kill`` is not; both take the whole tree."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._leftovers: set[Path] = set()

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int | IO[bytes],
    ) -> Child:
        """Start ``command`` in a new session, stdout and stderr to ``output``."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**environment, PARENT_VARIABLE: str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(name, process)

    def __repr__(self) -> str:
        state = "running" if self.running else describe_exit(self._process.returncode)
        return f"<Child {self.name}, pid {self.pid}, {state}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    @property
    def output(self) -> asyncio.StreamReader | None:
        """The child's output, when it was started with a pipe."""
        return self._process.stdout

    async def wait(self) -> int:
        """Its exit status (negative: the signal that ended it).

        asyncio's own wait also waits for the pipe, which a grandchild may hold for ever.
        """
        if self.running:
            await _ended(self.pid)
        while (status := self._process.returncode) is None:  # asyncio collects it in a thread of its own
            await asyncio.sleep(_POLL_S)
        return status

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, wait up to ``grace_s`` or until cancelled, then kill whatever is left of its tree."""
        tree = self._tree()
        try:
            if self.running:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self.wait()
        finally:  # also when a person who will not wait cancels the grace
            await self._sweep(tree)

    async def kill(self) -> None:
        """SIGKILL the whole tree at once, as a crash would."""
        await self._sweep(self._tree())

    def _tree(self) -> list[psutil.Process]:
        if not self.running:
            return []  # its pid may be another's by now
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _own_session(self) -> set[int]:
        """Its session, as long as that is not another's: a session's number stays taken while it has members."""
        return {self.pid} if self.running or not psutil.pid_exists(self.pid) else set()

    async def _sweep(self, tree: list[psutil.Process]) -> None:
        """Kill ``tree`` and everything that still belongs to one of its sessions, then its shared memory files."""
        doomed = list(
            {process.pid: process for process in [*tree, *_members(self._own_session() | _sessions_led(tree))]}.values()
        )
        leftovers = {path for process in doomed for path in _shared_memory(process)}
        # Python's resource trackers end when all others have, and remove what those left: they are killed last.
        trackers = [process for process in doomed if _is_tracker(process)]
        await _end([process for process in doomed if process not in trackers], _REAP_S)
        await self.wait()
        await _until_dead(trackers, _TRACKER_S)
        await _end(trackers, _REAP_S)
        for path in leftovers:
            path.unlink(missing_ok=True)


async def _end(processes: list[psutil.Process], within_s: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await _until_dead(processes, within_s)


async def _until_dead(processes: list[psutil.Process], within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while any(map(_is_alive, processes)):
                await asyncio.sleep(_POLL_S)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _sessions_led(tree: list[psutil.Process]) -> set[int]:
    """Sessions that processes of ``tree`` lead: a grandchild may have been started in its own."""
    return {process.pid for process in tree if _session(process.pid) == process.pid}


def _members(sessions: set[int]) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _session(process.pid) in sessions]


def _is_alive(process: psutil.Process) -> bool:
    """A zombie is dead: it holds nothing and waits for init, which may take seconds to look."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _shared_memory(process: psutil.Process) -> set[Path]:
    """Files in /dev/shm that ``process`` maps; a killed process cannot remove them itself."""
    try:
        text = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    names = (line.split(maxsplit=5)[-1] for line in text.splitlines() if "/dev/shm/" in line)
    return {Path(name) for name in names if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}


async def _ended(pid: int) -> None:
    """Return once the child ``pid`` ended. The kernel tells: a supervisor need not look at it day and night.

    It returns at once where the kernel does not: out of descriptors, or in a container that forbids the call.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def describe_exit(status: int | None) -> str:
    """An exit status in words, e.g. ``killed by SIGKILL``."""
    if status is None:
        return "running"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
