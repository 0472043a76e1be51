"""Which processes a cluster on one machine consists of, and the command of each. Nothing is started here."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from kvrelay.channel import reachable
from kvrelay.config import Config, MockConfig
from kvrelay.deploy import cores
from kvrelay.deploy.interpreter import python_module
from kvrelay.deploy.mock.roster import mock_names
from kvrelay.deploy.ports import CONTROL_PORT, PortClaims, require_free
from kvrelay.errors import Misconfigured
from kvrelay.types import Role, Value

LOOPBACK = "127.0.0.1"
_SOCKET_PATH_BYTES = 107
"""Longest path of a unix socket on Linux."""


class Kind(StrEnum):
    """What a member is."""

    STORE = "store"
    ROUTER = "router"
    WORKER = "worker"
    MOCK = "mock"
    """All workers and stores, simulated."""


class Member(Value, frozen=True, kw_only=True):
    """One process of the cluster."""

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    role: Role | None = None
    url: str = ""
    """Where it serves HTTP, the mock its faults; empty for a store."""
    socket: Path | None = None
    """A store's unix socket."""
    control: str = ""
    """A router's control port, as ``host:port``."""
    registers: tuple[str, ...] = ()
    """Under which names the router hears of it."""

    @property
    def writes(self) -> bool:
        """Whether answers come from it."""
        return self.kind is Kind.MOCK or (self.role is not None and self.role.decodes)

    @property
    def command(self) -> list[str]:
        return python_module("kvrelay", *self.arguments)


class RunDir:
    """The files of one running cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "cluster.lock"
        """Not the ``owner.lock`` of a scratch folder: no sweep may ever remove a folder that a person chose."""
        self.key = path / "key"
        self.config = path / "config.toml"
        self.logs = path / "logs"
        self.scratch = path / "t"
        """Temporary files of the cluster's processes; a short name, for unix sockets live in it."""

    def __repr__(self) -> str:
        return f"<RunDir {self.path}>"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def socket(self, store: str) -> Path:
        """Raises ``Misconfigured`` when the path would be too long for a unix socket."""
        path = self.path / f"{store}.sock"
        if len(str(path).encode()) > _SOCKET_PATH_BYTES:
            raise Misconfigured(f"{path} is too long for a unix socket; set KVRELAY_RUN_DIR to a shorter folder")
        return path


def settle_ports(config: Config, claims: PortClaims) -> Config:
    """``config`` with every port that was left open chosen and claimed. Raises ``Misconfigured`` when a wanted one is
    taken."""
    router = config.router
    require_free(router.host, router.port, "--port")
    require_free(router.control_host, router.control_port, CONTROL_PORT)
    for told in (router.port, router.control_port, config.mock.control_port):
        claims.keep(told)
    settled = msgspec.structs.replace(
        router,
        port=router.port or claims.free(router.host),
        control_port=router.control_port or claims.free(router.control_host),
    )
    return msgspec.structs.replace(config, router=settled, mock=_settled_mock(config.mock, claims))


def _settled_mock(mock: MockConfig, claims: PortClaims) -> MockConfig:
    if not mock.enabled:
        return mock
    require_free(LOOPBACK, mock.control_port, "mock.control_port in the configuration file (0: any)")
    return msgspec.structs.replace(mock, control_port=mock.control_port or claims.free(LOOPBACK))


def members(config: Config, run: RunDir, model: Path, claims: PortClaims) -> list[Member]:
    """The processes of ``config`` (ports settled), stores and router first, at ports that are claimed. Raises
    ``Misconfigured``."""
    roles = _roles(config)
    routers = _routers(config, run, model, claims)
    controls = _controls(routers)
    if config.mock.enabled:
        return [*routers, _mock(config, run, model, controls)]
    stores = [f"store-{index}" for index in range(config.cluster.stores)]
    counts = dict.fromkeys(Role, 0)
    workers: list[Member] = []
    for role, cpus in zip(roles, cores.share(_cores(config), len(roles)), strict=True):
        name = f"{role}-{counts[role]}"
        counts[role] += 1
        store = stores[-1] if role is Role.DECODE else stores[0]
        port = claims.free(config.worker.host)
        workers.append(_worker(config, run, model, controls, name=name, role=role, store=store, port=port, cpus=cpus))
    return [*(_store(config, run, store, controls) for store in stores), *routers, *workers]


def _roles(config: Config) -> list[Role]:
    cluster = config.cluster
    return [Role.PREFILL] * cluster.prefill + [Role.DECODE] * cluster.decode + [Role.BOTH] * cluster.colocated


def _cores(config: Config) -> tuple[int, ...]:
    return cores.parse(config.worker.cpus) if config.worker.cpus else cores.available()


def _controls(routers: list[Member]) -> tuple[str, ...]:
    """The flags that tell a member of all routers."""
    return tuple(part for router in routers for part in ("--router", router.control))


def _common(run: RunDir) -> tuple[str, ...]:
    return ("--config", str(run.config), "--key-file", str(run.key))


def _store(config: Config, run: RunDir, name: str, controls: tuple[str, ...]) -> Member:
    socket = run.socket(name)
    flags = ("--name", name, "--socket", str(socket), *controls)
    arguments = ("store", *_common(run), *flags)
    return Member(name=name, kind=Kind.STORE, arguments=arguments, socket=socket, registers=(name,))


def _routers(config: Config, run: RunDir, model: Path, claims: PortClaims) -> list[Member]:
    """All serve at one port; each has a control port of its own: that of the configuration, and free ones after it."""
    router = config.router
    ports = [router.control_port]
    while len(ports) < router.replicas:
        ports.append(claims.after(router.control_host, ports[-1]))
    return [
        Member(
            name=f"router-{number}" if number else "router",
            kind=Kind.ROUTER,
            arguments=("router", *_common(run), "--model", str(model), "--control-port", str(port)),
            url=f"http://{reachable(router.host)}:{router.port}",
            control=f"{reachable(router.control_host)}:{port}",
        )
        for number, port in enumerate(ports)
    ]


def _mock(config: Config, run: RunDir, model: Path, controls: tuple[str, ...]) -> Member:
    cluster = config.cluster
    names = mock_names(cluster.prefill, cluster.decode, cluster.colocated, stores=cluster.stores)
    size = ("--size", f"{cluster.prefill}x{cluster.decode}", "--colocated", str(cluster.colocated))
    return Member(
        name="mock",
        kind=Kind.MOCK,
        arguments=("mock-worker", *_common(run), *size, "--model", str(model), *controls),
        url=f"http://{LOOPBACK}:{config.mock.control_port}",
        registers=(*names.stores, *(worker.name for worker in names.workers)),
    )


def _worker(
    config: Config,
    run: RunDir,
    model: Path,
    controls: tuple[str, ...],
    *,
    name: str,
    role: Role,
    store: str,
    port: int,
    cpus: tuple[int, ...],
) -> Member:
    address = f"{reachable(config.worker.host)}:{port}"
    flags = {
        "--name": name,
        "--role": role.value,
        "--model": str(model),
        "--store-name": store,
        "--store-socket": str(run.socket(store)),
        "--port": str(port),
        "--advertise": address,
        "--cpus": ",".join(str(cpu) for cpu in cpus),
    }
    words = tuple(word for flag in flags.items() for word in flag)
    return Member(
        name=name,
        kind=Kind.WORKER,
        arguments=("worker", *_common(run), *controls, *words),
        role=role,
        url=f"http://{address}",
        registers=(name,),
    )
