"""The running processes of a cluster on this machine: started, followed until they are ready, started again. It must
never take a death that nobody wanted for one that was."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from kvrelay.deploy.absences import Absences
from kvrelay.deploy.comebacks import MOST_DEATHS, WELL_S, Comebacks
from kvrelay.deploy.members import Kind, Member, RunDir
from kvrelay.deploy.process import Child, describe_exit
from kvrelay.deploy.progress import STARTING, LogFollower, Progress
from kvrelay.deploy.revivals import Revivals
from kvrelay.errors import Lost
from kvrelay.race import until_one_ends

_log = logging.getLogger(__name__)

POLL_S = 0.1
STOP_GRACE_S = 15.0
"""A worker needs up to ten seconds to end its engine gently."""
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
        self._unstarted: dict[str, str] = {}
        """Why there is no new process of a member that was to be started again, by name."""
        self._doomed: set[str] = set()
        """Members that are meant to die."""
        self._is_kept_up = False
        """Who dies is to be started again."""
        self._due_s: dict[str, float] = {}
        """When each that died is to be started again, by name."""
        self._revivals = Revivals()
        """Restarts of routers, where there are several."""
        self._comebacks = Comebacks()
        """Restarts of all other members."""
        self._serving_since_s: dict[str, float] = {}
        """When the present process of each member was first seen to serve, by name."""
        self._absences = Absences()
        self._starts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks, by name: who has died is started by one of those who want it to run, and by none once it was killed
        on purpose."""

    def __repr__(self) -> str:
        return f"<Crew of {len(self.members)}, {len(self.running())} running, {len(self._due_s)} due>"

    def __len__(self) -> int:
        """Processes that were started."""
        return len(self._children)

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def running(self) -> list[Member]:
        return [member for member in self.members.values() if self._runs(member.name)]

    def serving(self) -> list[Member]:
        """Members that run and are ready."""
        return [member for member in self.running() if self._followers[member.name].progress.ready]

    def routers(self) -> list[Member]:
        """Routers that run."""
        return [member for member in self.running() if member.kind is Kind.ROUTER]

    def serving_routers(self) -> list[Member]:
        """Routers that run and are ready."""
        for router in self.routers():
            self._followers[router.name].read()
        return [member for member in self.serving() if member.kind is Kind.ROUTER]

    def _runs(self, name: str) -> bool:
        return name in self._children and self._children[name].running

    # ------------------------------------------------------------ start and end

    async def start(self, member: Member) -> None:
        """Its death is a crash from now on. Raises ``Lost`` when the system has no process or no log for it: then it is
        as dead as it was."""
        self.members[member.name] = member
        self._serving_since_s.pop(member.name, None)
        try:
            self._children[member.name] = await self._started(member)
        except OSError as error:
            why = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
            self._unstarted[member.name] = f"cannot be started, {why}"
            raise Lost(f"{member.name} cannot be started: {why}") from error
        self._unstarted.pop(member.name, None)
        self._doomed.discard(member.name)  # not before: the old one's death was wanted
        self._on_progress(member.name, STARTING)

    async def _started(self, member: Member) -> Child:
        log = self._run.log(member.name)
        self._followers[member.name] = LogFollower(log)
        self._run.logs.mkdir(mode=0o700, exist_ok=True)  # somebody may have moved them away
        environment = {**os.environ, "TMPDIR": str(self._run.scratch), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            return await Child.start(member.name, member.command, environment, output)

    async def start_again(self, name: str, within_s: float) -> None:
        """Return once it is ready; kill it first when it runs. Raises ``Lost``."""
        async with self._starts[name]:
            if self._runs(name):
                await self._kill(name)
            await self.start(self.members[name])
            self._settled(name)
        await self.until_ready([name], within_s)

    async def kill(self, name: str) -> None:
        """SIGKILL it and everything below it."""
        async with self._starts[name]:
            await self._kill(name)
            self._settled(name)

    def _settled(self, name: str) -> None:
        self._due_s.pop(name, None)
        self._comebacks.wanted(name)

    async def _kill(self, name: str) -> None:
        self._doomed.add(name)
        await self._children[name].kill()

    async def stop(self) -> None:
        """All of them, gently."""
        self._doomed |= set(self.members)
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in self._children.values()))

    async def end(self, name: str) -> None:
        """SIGKILL ``name``, which stands still: a death like any other."""
        await self._children[name].kill()

    # ------------------------------------------------------------ who dies and is started again

    async def keep_up(self) -> None:
        """Start again who dies, each on its own, until that is of no use: ``raise_if_crashed``. Raises ``Lost``."""
        self._is_kept_up = True
        try:
            await until_one_ends(self._until_crash(), *map(self._keep_up, self.members))
        finally:
            self._is_kept_up = False

    async def _until_crash(self) -> None:
        while True:
            self.raise_if_crashed()
            await asyncio.sleep(POLL_S)

    async def _keep_up(self, name: str) -> None:
        while True:
            await self.revive(name, asyncio.get_running_loop().time())
            await asyncio.sleep(POLL_S)

    def note_dead_routers(self, now: float) -> None:
        """Replicas that died are to be started again, unless none is left and they died too often; their death is no
        crash then. An only router is a member like any other."""
        if not self.routers() and not self._revivals.may_begin_anew(now):
            self._due_s = {name: due_s for name, due_s in self._due_s.items() if not self._is_replica(name)}
            return
        for name in filter(self._is_replica, self._dead()):
            if name not in self._due_s:
                served = self._followers[name].read().ready
                pause_s = self._revivals.died(name, now, served=served)
                self._due_s[name] = now + pause_s
                self._tell_death(name, now, pause_s if self.routers() else 0.0)
        if not self.routers():
            self._due_s.update(dict.fromkeys(filter(self._is_replica, self._due_s), now))

    async def revive(self, name: str, now: float) -> None:
        """Start ``name`` again, on its old ports, if it died and its time has come."""
        if not self._is_dead(name) or now < self._due_s.get(name, math.inf):
            return
        async with self._starts[name]:
            if self._is_dead(name):  # others may have done something meanwhile
                if not self._is_replica(name):
                    await self._children[name].kill()  # what it left behind may hold its ports
                await self._try_start(self.members[name])
            self._due_s.pop(name, None)

    async def _try_start(self, member: Member) -> None:
        """One that cannot be started is found dead once more at the next look, which says why."""
        with contextlib.suppress(Lost):
            await self.start(member)

    def _is_replica(self, name: str) -> bool:
        routers = [each.name for each in self.members.values() if each.kind is Kind.ROUTER]
        return len(routers) > 1 and name in routers

    def _dead(self) -> list[str]:
        """Members that died and were not killed on purpose."""
        return [name for name in self.members if self._is_dead(name)]

    def _is_dead(self, name: str) -> bool:
        return not self._runs(name) and name not in self._doomed

    def _how(self, name: str) -> str:
        """How it died."""
        return self._unstarted.get(name) or describe_exit(self._children[name].exit_status)

    def _tell_death(self, name: str, now: float, pause_s: float) -> None:
        ending = "was stopped" if self._was_stopped(name) else f"died ({self._how(name)})"
        self._absences.began(name, ending, now, pause_s=pause_s, log=self._run.log(name))

    def _was_stopped(self, name: str) -> bool:
        """Whether it ended as one does that is asked to, as after a drain."""
        return name not in self._unstarted and self._children[name].exit_status == 0

    def note_dead_members(self, now: float) -> None:
        """Others that died, once all had come to serve, are to be started again: that is no crash."""
        self._note_serving(now)
        known = self._comebacks
        dead = [name for name in self._dead() if not self._is_replica(name)]
        noted = [name for name in dead if name not in self._due_s and not known.is_down(name)]
        for name in noted:
            pause_s = known.died(name, now - self._serving_since_s.get(name, now))
            if pause_s is not None:
                self._due_s[name] = now + pause_s
                self._tell_death(name, now, pause_s)
        for name in filter(known.is_down, noted):  # last: whether the rest goes on depends on all of them
            self._tell_down(name)

    def _note_serving(self, now: float) -> None:
        for member in self.running():
            if member.name not in self._serving_since_s:
                self._follow([member.name])
                if self._followers[member.name].progress.ready:
                    self._serving_since_s[member.name] = now
                    self._absences.ended(member.name, now)

    def _tell_down(self, name: str) -> None:
        often = f"{name} died {MOST_DEATHS} times in a row and did not serve for {WELL_S:g} s in between"
        if self._is_excused(name):
            _log.error("%s\n%s: it stays down, and the rest goes on without it", self._obituary(name), often)
        else:
            _log.error("%s: it is not started again", often)

    # ------------------------------------------------------------ how they are

    def raise_if_crashed(self, needed: Collection[str] = ()) -> None:
        """Raises ``Lost`` when one died that nobody killed and that is not to be started again, unless the rest can do
        without it: it died too often, is not ``needed``, and others write."""
        if self._is_kept_up:  # or who died since the last look would be taken for one that stays dead
            now = asyncio.get_running_loop().time()
            self.note_dead_routers(now)
            self.note_dead_members(now)
        for name, child in self._children.items():
            is_missed = name in needed and self._comebacks.is_down(name)
            if not child.running and name not in self._doomed and (is_missed or not self._is_excused(name)):
                raise Lost(self._obituary(name))

    def _is_excused(self, name: str) -> bool:
        if self._comebacks.is_down(name):
            decodes = (member.name for member in self.members.values() if member.writes)
            return self.members[name].kind is not Kind.ROUTER and not all(map(self._comebacks.is_down, decodes))
        return name in self._due_s

    async def until_ready(self, names: Iterable[str], within_s: float) -> None:
        """Raises ``Lost`` when one is not, or anybody died."""
        names = list(names)
        try:
            async with asyncio.timeout(within_s):
                while self._follow(names):
                    self.raise_if_crashed(names)
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

    def _obituary(self, name: str) -> str:
        """The cause first and, below what the log says of it, again: the last line is what people read."""
        how, log = self._how(name), self._run.log(name)
        said = [line[:_QUOTED_CHARS] for line in self._followers[name].errors(_QUOTED_LINES)]
        if not said:
            return f"{name} died ({how}); no error is in its log, {log}"
        listed = "\n".join(f"  {line}" for line in said)
        cause = how if how.startswith("killed") else said[0]
        return f"{name} died ({how}). Errors in its log, {log}:\n{listed}\n{name} died: {cause}"
