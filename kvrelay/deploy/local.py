"""A whole cluster on this machine, as child processes of the one that opens it.

However the block ends, no process and no file stays behind, except the logs when something crashed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvrelay.config import Config
from kvrelay.config_text import render
from kvrelay.deploy.folder_lock import FolderLock
from kvrelay.deploy.key import new_key, read_key, write_secret
from kvrelay.deploy.members import Kind, Member, RunDir, members, settle_ports
from kvrelay.deploy.model import model_path
from kvrelay.deploy.process import Child, describe_exit
from kvrelay.deploy.progress import STARTING, LogFollower, Progress, error_lines
from kvrelay.deploy.ranks import require_ranks
from kvrelay.deploy.readiness import lacking
from kvrelay.deploy.scratch import Scratch
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.errors import Lost
from kvrelay.protocol.engine import engine_key
from kvrelay.types import Role, Value

RUN_DIR_VARIABLE = "KVRELAY_RUN_DIR"
MADE_UP = "made-up"
"""Name of the model that mock workers serve when none is given: a tokenizer, and context for long prompts."""
_POLL_S = 0.1
_STOP_GRACE_S = 15.0
"""A worker needs up to ten seconds to end its engine gently."""
_HEALTHY_WAIT_S = 15.0
_MAX_REVIVALS = 8
"""Routers that die more often have a fault that a new start does not mend."""
_QUOTED_LINES = 9
_QUOTED_CHARS = 300

OnProgress = Callable[[str, Progress], None]
"""Called with a member's name when it gets a step further."""


class WorkerView(Value, frozen=True, kw_only=True):
    """A worker of the cluster, as its user sees it."""

    name: str
    role: Role
    pid: int
    """The supervising process; the engine's processes are below it."""
    url: str
    """The engine's own OpenAI server."""


def _ignore(_name: str, _progress: Progress) -> None: ...


def _ignore_run_dir(_path: Path) -> None: ...


class LocalCluster:
    """``async with LocalCluster(config) as cluster``: everything serves inside the block, nothing is left after it."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path | None = None,
        model: Path | None = None,
        on_run_dir: Callable[[Path], None] = _ignore_run_dir,
        on_progress: OnProgress = _ignore,
    ) -> None:
        """``on_run_dir`` is called once, with the run directory, before the first process starts."""
        self._wanted = config
        self._run_dir = run_dir or (Path(os.environ[RUN_DIR_VARIABLE]) if RUN_DIR_VARIABLE in os.environ else None)
        self._scratch: Scratch | None = None
        """The run directory when nobody chose one."""
        self._lock: FolderLock | None = None
        """Whoever does not hold it owns nothing in the run directory."""
        self._model = model
        self._on_run_dir = on_run_dir
        self._on_progress = on_progress
        self._members: dict[str, Member] = {}
        self._children: dict[str, Child] = {}
        self._followers: dict[str, LogFollower] = {}
        self._revivals = 0
        self._doomed: set[str] = set()
        """Members that are meant to die."""

    def __repr__(self) -> str:
        running = sum(child.running for child in self._children.values())
        return f"<LocalCluster {len(self._members)} members, {running} running>"

    # ------------------------------------------------------------ what its user sees

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        return self._members["router"].url

    @property
    def controls(self) -> list[str]:
        """Where operators reach each router."""
        return [member.control for member in self._members.values() if member.kind is Kind.ROUTER]

    @property
    def workers(self) -> list[WorkerView]:
        return [
            WorkerView(name=member.name, role=member.role, pid=self._children[member.name].pid, url=member.url)
            for member in self._members.values()
            if member.role is not None
        ]

    @property
    def stores(self) -> dict[str, Path]:
        """Unix socket of each store, by its name."""
        return {member.name: member.socket for member in self._members.values() if member.socket is not None}

    @property
    def key(self) -> bytes:
        return read_key(self.run.key)

    @property
    def engine_key(self) -> str:
        """Bearer token for a worker's own ``url``."""
        return engine_key(self.key)

    @property
    def names(self) -> list[str]:
        """All members, in the order of their start."""
        return list(self._members)

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def log(self, name: str) -> Path:
        return self.run.log(name)

    async def wait(self) -> None:
        """Wait until a member dies that nobody killed, and raise ``Lost`` then; of several routers one may."""
        while True:
            await self._revive_routers()
            self._raise_if_crashed()
            await asyncio.sleep(_POLL_S)

    async def _revive_routers(self) -> None:
        """Start replicas again that died while another one serves."""
        if not self._routers():
            return
        for member in self._members.values():
            dead = member.kind is Kind.ROUTER and not self._children[member.name].running
            if dead and member.name not in self._doomed and self._revivals < _MAX_REVIVALS:
                self._revivals += 1
                await self._spawn(member)

    async def kill(self, name: str) -> None:
        """SIGKILL the member ``name`` and everything below it."""
        self._doomed.add(name)
        await self._children[name].kill()

    async def restart(self, name: str) -> None:
        """Start ``name`` again, on its old ports; return once the router knows it. Kills it first when it runs."""
        if self._children[name].running:
            await self.kill(name)
        self._doomed.discard(name)
        await self._spawn(self._members[name])
        await self._until_ready([name])
        await self._until_healthy()

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> LocalCluster:
        wanted_model = self._find_model()
        self.config = settle_ports(self._wanted)
        self.run = RunDir(self._run_dir or self._own_dir())
        try:
            self._prepare()
            self.model = wanted_model or make_tiny(self.run.scratch / MADE_UP, TinyShape(max_positions=1 << 17))
            wanted = members(self.config, self.run, self.model)
            self._on_run_dir(self.run.path)
            for member in wanted:
                self._members[member.name] = member
                await self._spawn(member)
            await self._until_ready(self.names)
            await self._until_healthy()
        except BaseException as error:
            await self._close(keep_logs=not isinstance(error, asyncio.CancelledError))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is None or issubclass(kind, (asyncio.CancelledError, KeyboardInterrupt))
        await self._close(keep_logs=not interrupted)

    def _find_model(self) -> Path | None:
        """None: mock workers make do with a model that is made up. Raises ``Misconfigured``."""
        mock, wanted = self._wanted.mock.enabled, self._wanted.model.path
        if self._model is None and mock and not wanted:
            return None
        model = self._model or model_path(wanted, weights=not mock)
        if not mock:
            require_ranks(model, self._wanted.worker.tensor_parallel)
        return model

    def _own_dir(self) -> Path:
        self._scratch = Scratch("kvrelay-")
        return self._scratch.path

    def _prepare(self) -> None:
        self.run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = FolderLock(self.run.lock)
        self.run.logs.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(self.run.scratch, ignore_errors=True)  # of a cluster that was killed here
        self.run.scratch.mkdir(mode=0o700)
        write_secret(self.run.key, new_key())
        write_secret(self.run.config, render(self.config))  # it holds the clients' API keys

    async def _spawn(self, member: Member) -> None:
        log = self.run.log(member.name)
        self._followers[member.name] = LogFollower(log)
        environment = {**os.environ, "TMPDIR": str(self.run.scratch), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            child = await Child.start(member.name, member.command, environment, output)
        self._children[member.name] = child
        self._on_progress(member.name, STARTING)

    def _raise_if_crashed(self) -> None:
        for name, child in self._children.items():
            if not child.running and name not in self._doomed:
                raise Lost(_obituary(name, describe_exit(child.exit_status), self.run.log(name)))

    async def _until_ready(self, names: list[str]) -> None:
        limit_s = self.config.worker.start_wait_s + _STOP_GRACE_S  # a worker that is too slow says so itself before
        try:
            async with asyncio.timeout(limit_s):
                while self._follow(names):
                    self._raise_if_crashed()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            late = ", ".join(self._follow(names))
            raise Lost(f"not ready after {limit_s:g} s: {late}; see the logs in {self.run.logs}") from error

    def _follow(self, names: list[str]) -> list[str]:
        """Report the steps that ``names`` have taken; those that are not ready yet."""
        for name in names:
            follower = self._followers[name]
            before = follower.progress
            if follower.read() != before:
                self._on_progress(name, follower.progress)
        return [name for name in names if not self._followers[name].progress.ready]

    async def _until_healthy(self) -> None:
        """The router has heard of everybody that runs; registrations take a heartbeat or two."""
        answer = "no answer"
        try:
            async with asyncio.timeout(_HEALTHY_WAIT_S):
                for router in self._routers():
                    while answer := await lacking(router.control, self.key, self._expected()):
                        self._raise_if_crashed()
                        await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Lost(f"the router at {self.url} did not become healthy: {answer}") from error

    def _routers(self) -> list[Member]:
        """Those that run."""
        routers = [member for member in self._members.values() if member.kind is Kind.ROUTER]
        return [router for router in routers if self._children[router.name].running]

    def _expected(self) -> set[str]:
        """Workers and stores that the router should know."""
        running = [member for member in self._members.values() if self._children[member.name].running]
        return {name for member in running for name in member.registers}

    async def _close(self, *, keep_logs: bool) -> None:
        self._doomed |= set(self._members)
        try:
            await asyncio.gather(*(child.stop(_STOP_GRACE_S) for child in self._children.values()))
        finally:  # also when the stop is cut short
            self._remove_files(keep_logs=keep_logs)

    def _remove_files(self, *, keep_logs: bool) -> None:
        if self._lock is not None:
            for path in (self.run.key, self.run.config, *self.stores.values()):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.run.scratch, ignore_errors=True)
            self._lock.release()
            self._lock = None
        if self._scratch is not None and keep_logs and self._children:
            self._scratch.keep()
        elif self._scratch is not None:
            self._scratch.remove()


def _obituary(name: str, exit_status: str, log: Path) -> str:
    """The cause first and, below what the log says of it, again: the last line is what people read."""
    quoted = error_lines(log, _QUOTED_LINES)
    if not quoted:
        return f"{name} died ({exit_status}); no error is in its log, {log}"
    said = [line[:_QUOTED_CHARS] for line in quoted]
    listed = "\n".join(f"  {line}" for line in said)
    cause = exit_status if exit_status.startswith("killed") else said[0]
    return f"{name} died ({exit_status}). Errors in its log, {log}:\n{listed}\n{name} died: {cause}"
