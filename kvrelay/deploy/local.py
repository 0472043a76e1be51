"""A whole cluster on this machine, as child processes of the one that opens it.

However the block ends, no process and no file stays behind, except the logs when something crashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from kvrelay.config import Config
from kvrelay.config_text import render
from kvrelay.deploy.architecture import Architecture
from kvrelay.deploy.crew import POLL_S, STOP_GRACE_S, Crew, OnProgress
from kvrelay.deploy.folder_lock import FolderLock
from kvrelay.deploy.key import new_key, read_key, write_secret
from kvrelay.deploy.kv_room import require_room
from kvrelay.deploy.members import Kind, Member, RunDir, members, settle_ports
from kvrelay.deploy.model import model_path
from kvrelay.deploy.ports import PortClaims
from kvrelay.deploy.progress import Progress
from kvrelay.deploy.ranks import require_ranks
from kvrelay.deploy.readiness import lacking
from kvrelay.deploy.scratch import Scratch
from kvrelay.deploy.startable import require_cluster, require_sound
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.deploy.watch import RouterWatch
from kvrelay.errors import Lost, Misconfigured
from kvrelay.protocol.engine import engine_key
from kvrelay.race import until_one_ends
from kvrelay.types import Role, Value

RUN_DIR_VARIABLE = "KVRELAY_RUN_DIR"
MADE_UP = "made-up"
"""Name of the model that mock workers serve when none is given: a tokenizer, and context for long prompts."""
_ON_PURPOSE = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""Somebody ended it, or closed the pipe that it wrote to: no crash whose logs are wanted."""
_KNOWN_WAIT_S = 15.0
"""Longest time from a member's start until the routers know it."""


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
        self._ports = PortClaims()
        """Its members find them free whenever they are started again."""
        self._crew = Crew(RunDir(Path()), on_progress)

    def __repr__(self) -> str:
        return f"<LocalCluster, {self._crew!r}>"

    # ------------------------------------------------------------ what its user sees

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        return self._crew.members["router"].url

    @property
    def controls(self) -> list[str]:
        """Where operators reach each router."""
        return [member.control for member in self._crew.members.values() if member.kind is Kind.ROUTER]

    @property
    def workers(self) -> list[WorkerView]:
        return [
            WorkerView(name=member.name, role=member.role, pid=self._crew.pid(member.name), url=member.url)
            for member in self._crew.members.values()
            if member.role is not None
        ]

    @property
    def stores(self) -> dict[str, Path]:
        """Unix socket of each store, by its name."""
        return {member.name: member.socket for member in self._crew.members.values() if member.socket is not None}

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
        return list(self._crew.members)

    def pid(self, name: str) -> int:
        return self._crew.pid(name)

    def log(self, name: str) -> Path:
        return self.run.log(name)

    async def wait(self) -> None:
        """Start again who dies, and raise ``Lost`` when that is of no use: the routers died, or no worker that can
        write stays up."""
        await until_one_ends(self._crew.keep_up(), RouterWatch(self._crew, self.key).run())

    async def kill(self, name: str) -> None:
        """SIGKILL the member ``name`` and everything below it."""
        await self._crew.kill(name)

    async def start_again(self, name: str) -> None:
        """Start ``name`` again, on its old ports; return once it is ready. Kills it first when it runs."""
        await self._crew.start_again(name, self._start_wait_s)

    async def restart(self, name: str) -> None:
        """Start ``name`` again, and return once the routers know it. Raises ``Lost``."""
        await self.start_again(name)
        await self._until_known([name])

    @property
    def _start_wait_s(self) -> float:
        return self.config.worker.start_wait_s + STOP_GRACE_S  # a worker that is too slow says so itself before

    # ------------------------------------------------------------ start and end

    async def __aenter__(self) -> LocalCluster:
        require_sound(self._wanted)
        require_cluster(self._wanted)
        wanted_model = self._find_model()
        with _writing(self._run_dir or Path(tempfile.gettempdir())):
            self.run = RunDir(self._run_dir or self._own_dir())
        self._crew = Crew(self.run, self._on_progress)
        try:
            self.config = settle_ports(self._wanted, self._ports)
            with _writing(self.run.path):
                self._prepare()
                self.model = wanted_model or make_tiny(self.run.scratch / MADE_UP, TinyShape(max_positions=1 << 17))
            wanted = members(self.config, self.run, self.model, self._ports)
            self._on_run_dir(self.run.path)
            for member in wanted:
                await self._crew.start(member)
            await self._crew.until_ready(self.names, self._start_wait_s)
            await self._until_known(self.names)
        except BaseException as error:
            await self._close(keep_logs=not isinstance(error, _ON_PURPOSE))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(keep_logs=kind is not None and not issubclass(kind, _ON_PURPOSE))

    def _find_model(self) -> Path | None:
        """None: mock workers make do with a model that is made up. Raises ``Misconfigured``."""
        mock, wanted = self._wanted.mock.enabled, self._wanted.model.path
        if self._model is None and mock and not wanted:
            return None
        model = self._model or model_path(wanted, weights=not mock)
        if not mock:
            architecture = Architecture.read(model)
            require_ranks(architecture, self._wanted.worker.tensor_parallel)
            require_room(architecture, self._wanted)
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

    async def _until_known(self, names: list[str]) -> None:
        """The routers have heard of ``names``, and those among them of everybody; that takes a heartbeat or two."""
        answer = "no answer"
        try:
            async with asyncio.timeout(_KNOWN_WAIT_S):
                for router in self._crew.routers():
                    while answer := await self._lacking(router, names):
                        self._crew.raise_if_crashed(names)
                        await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Lost(f"the router at {self.url} did not become healthy: {answer}") from error

    async def _lacking(self, router: Member, names: list[str]) -> str:
        """What is missing at ``router``, in words. Others may be restarted, killed or drained at the same time."""
        if router not in self._crew.routers():
            return ""
        wanted = _registered(member for member in self._crew.running() if member.name in names)
        others = _registered(self._crew.serving()) - wanted if router.name in names else set()
        return await lacking(router.control, self.key, wanted, or_draining=others)

    async def _close(self, *, keep_logs: bool) -> None:
        try:
            await self._crew.stop()
        finally:  # also when the stop is cut short
            self._ports.release()
            self._remove_files(keep_logs=keep_logs)

    def _remove_files(self, *, keep_logs: bool) -> None:
        if self._lock is not None:
            for path in (self.run.key, self.run.config, *self.stores.values()):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.run.scratch, ignore_errors=True)
            self._lock.release()
            self._lock = None
        if self._scratch is not None and keep_logs and len(self._crew):
            self._scratch.keep()
        elif self._scratch is not None:
            self._scratch.remove()


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises ``Misconfigured`` when files cannot be made below ``folder``."""
    try:
        yield
    except OSError as error:
        raise Misconfigured(
            f"cannot write to {error.filename or folder}: {error.strerror}; mend that, or set {RUN_DIR_VARIABLE} to a "
            f"folder with room that is yours"
        ) from error


def _registered(members: Iterable[Member]) -> set[str]:
    """Workers and stores that routers hear of from ``members``."""
    return {name for member in members for name in member.registers}
