"""The running processes of a cluster on this machine: started, followed until they are ready, started again. It must
never take a death that nobody wanted for one that was."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from kvrelay.deploy.members import Kind, Member, RunDir
from kvrelay.deploy.process import Child, describe_exit
from kvrelay.deploy.progress import STARTING, LogFollower, Progress, error_lines
from kvrelay.errors import Lost

POLL_S = 0.1
STOP_GRACE_S = 15.0
"""A worker needs up to ten seconds to end its engine gently."""
_MAX_REVIVALS = 8
"""Routers that die more often have a fault that a new start does not mend."""
_QUOTED_LINES = 9
_QUOTED_CHARS = 300

OnProgress = Callable[[str, Progress], None]
"""Called with a member's name when it gets a step further."""


class Crew:
    """Members and their processes, by name."""

    def __init__(self, run: RunDir, on_progress: OnProgress) -> None:
        self._run = run
        self._on_progress = on_progress
        self.members: dict[str, Member] = {}
        """In the order of their start."""
        self._children: dict[str, Child] = {}
        self._followers: dict[str, LogFollower] = {}
        self._doomed: set[str] = set()
        """Members that are meant to die."""
        self._revivals = 0

    def __repr__(self) -> str:
        return f"<Crew of {len(self.members)}, {len(self.running())} running>"

    def __len__(self) -> int:
        """Processes that were started."""
        return len(self._children)

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def running(self) -> list[Member]:
        return [member for member in self.members.values() if self._runs(member.name)]

    def serving(self) -> list[Member]:
        """Those that run and are ready."""
        return [member for member in self.running() if self._followers[member.name].progress.ready]

    def routers(self) -> list[Member]:
        """Those that run."""
        return [member for member in self.running() if member.kind is Kind.ROUTER]

    def _runs(self, name: str) -> bool:
        return name in self._children and self._children[name].running

    # ------------------------------------------------------------ start and end

    async def start(self, member: Member) -> None:
        """Its death is a crash from now on."""
        self.members[member.name] = member
        log = self._run.log(member.name)
        self._followers[member.name] = LogFollower(log)
        environment = {**os.environ, "TMPDIR": str(self._run.scratch), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            child = await Child.start(member.name, member.command, environment, output)
        self._children[member.name] = child
        self._doomed.discard(member.name)  # not before: the old one's death was wanted
        self._on_progress(member.name, STARTING)

    async def start_again(self, name: str, within_s: float) -> None:
        """Return once it is ready; kill it first when it runs. Raises ``Lost``."""
        if self._runs(name):
            await self.kill(name)
        await self.start(self.members[name])
        await self.until_ready([name], within_s)

    async def kill(self, name: str) -> None:
        """SIGKILL it and everything below it."""
        self._doomed.add(name)
        await self._children[name].kill()

    async def stop(self) -> None:
        """All of them, gently."""
        self._doomed |= set(self.members)
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in self._children.values()))

    async def revive_routers(self) -> None:
        """Start replicas again that died while another one serves."""
        if not self.routers():
            return
        for member in list(self.members.values()):
            dead = member.kind is Kind.ROUTER and not self._runs(member.name)
            if dead and member.name not in self._doomed and self._revivals < _MAX_REVIVALS:
                self._revivals += 1
                await self.start(member)

    # ------------------------------------------------------------ how they are

    def raise_if_crashed(self) -> None:
        """Raises ``Lost`` when one died that nobody killed."""
        for name, child in self._children.items():
            if not child.running and name not in self._doomed:
                raise Lost(_obituary(name, describe_exit(child.exit_status), self._run.log(name)))

    async def until_ready(self, names: Iterable[str], within_s: float) -> None:
        """Raises ``Lost`` when one is not, or anybody died."""
        names = list(names)
        try:
            async with asyncio.timeout(within_s):
                while self._follow(names):
                    self.raise_if_crashed()
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            late = ", ".join(self._follow(names))
            raise Lost(f"not ready after {within_s:g} s: {late}; see the logs in {self._run.logs}") from error

    def _follow(self, names: list[str]) -> list[str]:
        """Report the steps that ``names`` have taken; those that are not ready yet."""
        for name in names:
            follower = self._followers[name]
            before = follower.progress
            if follower.read() != before:
                self._on_progress(name, follower.progress)
        return [name for name in names if not self._followers[name].progress.ready]


def _obituary(name: str, exit_status: str, log: Path) -> str:
    """The cause first and, below what the log says of it, again: the last line is what people read."""
    quoted = error_lines(log, _QUOTED_LINES)
    if not quoted:
        return f"{name} died ({exit_status}); no error is in its log, {log}"
    said = [line[:_QUOTED_CHARS] for line in quoted]
    listed = "\n".join(f"  {line}" for line in said)
    cause = exit_status if exit_status.startswith("killed") else said[0]
    return f"{name} died ({exit_status}). Errors in its log, {log}:\n{listed}\n{name} died: {cause}"
