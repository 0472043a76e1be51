"""``kvrelay store``, ``router`` and ``worker``: one process each, in the foreground; for several machines."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.settings import ConfigFile, KeyFile, Model, check_addresses, check_name, load
from kvrelay.cli.terminal import errors, reported, run
from kvrelay.deploy.command import program_anywhere
from kvrelay.deploy.descriptors import raise_descriptor_limit
from kvrelay.deploy.key import read_key
from kvrelay.deploy.model import model_path
from kvrelay.deploy.ports import CONTROL_PORT, PortClaims, require_free
from kvrelay.deploy.progress import READY_MARK
from kvrelay.errors import Misconfigured
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.types import Role, StoreInfo, WorkerInfo

_COLLECT_AFTER = (20_000, 20, 20)
"""Objects made and not yet gone, then collections of the younger generation, after which a generation is collected."""
Routers = Annotated[
    list[str] | None, typer.Option("--router", help="HOST:PORT of a router's control port; repeatable.")
]


def announce_ready(text: str) -> None:
    """The line that supervisors and people wait for."""
    sys.stdout.write(f"{READY_MARK} {text}\n")
    sys.stdout.flush()


def store(
    socket: Annotated[Path, typer.Option(help="Unix socket for this node's workers.")],
    key_file: KeyFile,
    name: Annotated[
        str, typer.Option(help="Name, unique in the cluster. Default: the socket's name without .sock.")
    ] = "",
    router: Routers = None,
    config: ConfigFile = None,
) -> None:
    """Run one node's page store: shared memory that workers on the node map, and links to the other stores.

    Example:  kvrelay store --socket /run/kvrelay/store.sock --key-file key --router 10.0.0.1:7080
    """
    with reported():
        settings, key, routers = load(config), read_key(key_file), check_addresses("--router", router)
        name = check_name("--name", name or socket.stem)
        require_free(settings.store.peer_host, settings.store.peer_port, "store.peer_port in the configuration file")
        _make_folder(socket.parent)
    raise_descriptor_limit()
    from kvrelay.store.daemon import run_store

    def ready(info: StoreInfo) -> None:
        announce_ready(f"store {info.name} at {socket}, {info.capacity_bytes} bytes, peers at {info.address}")

    run(run_store(settings, name=name, socket_path=socket, key=key, routers=routers, ready=ready))


def _make_folder(folder: Path) -> None:
    """Say so: it may be a slip, and workers look for the socket elsewhere. Raises ``Misconfigured``."""
    if folder.is_dir():
        return
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise Misconfigured(f"cannot make the folder {folder} for --socket: {error.strerror}") from error
    told = f"warning: there was no folder {folder}; it is made for --socket"
    errors.print(told, style="yellow", markup=False, soft_wrap=True)


def router(
    key_file: KeyFile,
    model: Model = "",
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI API. Default 8000.")] = None,
    control_port: Annotated[
        int | None, typer.Option(help="Port at which workers and stores register. Default 7080.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run the front door: the OpenAI API for clients, and a control port where workers and stores register.

    Example:  kvrelay router --key-file key --model ~/.cache/kvrelay/models/SmolLM2-135M-Instruct
    """
    with reported():
        settings = load(config, router={"port": port, "control_port": control_port}, model={"path": model})
        shared = settings.router.replicas > 1
        require_free(settings.router.host, settings.router.port, "--port", shared=shared)
        require_free(settings.router.control_host, settings.router.control_port, CONTROL_PORT)
        key, folder = read_key(key_file), model_path(settings.model.path, weights=False)
    raise_descriptor_limit()
    import uvloop

    from kvrelay.router.runner import run_router

    def ready(api: str, control: str) -> None:
        _collect_seldom()
        announce_ready(f"router at {api}, workers register at {control}")

    drain = DrainCommand(program=program_anywhere(), key_file=str(key_file.absolute()))
    run(run_router(settings, key=key, model_path=folder, ready=ready, drain=drain), loop=uvloop.new_event_loop)


def _collect_seldom() -> None:
    """Python looks for cycles among all objects again and again, modules included, and streams wait meanwhile,
    as long as 0.1 s. What is there when the router begins stays for good, so it is not looked at any more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def worker(
    store_socket: Annotated[Path, typer.Option(help="Unix socket of this node's store.")],
    key_file: KeyFile,
    name: Annotated[str, typer.Option(help="Name, unique in the cluster. Default: ROLE-PORT.")] = "",
    role: Annotated[Role | None, typer.Option(help="prefill, decode or both. Default both.")] = None,
    model: Model = "",
    router: Routers = None,
    store_name: Annotated[str, typer.Option(help="Name of the store. Default: the socket's name without .sock.")] = "",
    host: Annotated[str, typer.Option(help="Address of the engine. Default 127.0.0.1.", show_default=False)] = "",
    port: Annotated[int, typer.Option(help="Port of the engine; 0 takes a free one.")] = 0,
    advertise: Annotated[
        str, typer.Option(help="HOST:PORT told to the routers, when it is not that.", show_default=False)
    ] = "",
    cpus: Annotated[str, typer.Option(help="Cores to pin the engine to, e.g. 0-3.", show_default=False)] = "",
    config: ConfigFile = None,
) -> None:
    """Run one vLLM engine with kvrelay's connector, and keep the routers told whether it is well.

    A router on another machine needs an address that it can reach: --host. The engine asks everybody for a key that
    follows from the cluster's; what it is asked crosses the network in the clear, so keep that network private.

    Example:  kvrelay worker --role prefill --store-socket /run/kvrelay/store.sock --key-file key
    --router 10.0.0.1:7080 --host 10.0.0.2
    """
    from kvrelay.deploy.worker import WorkerPlan, run_worker

    claims = PortClaims()
    with reported():
        given = {"role": role and role.value, "host": host, "advertise": advertise, "cpus": cpus}
        settings = load(config, worker=given, model={"path": model})
        routers = check_addresses("--router", router)
        kind = settings.worker.role or Role.BOTH
        require_free(settings.worker.host, port, "--port")
        port = port or claims.free(settings.worker.host)
        plan = WorkerPlan(
            name=check_name("--name", name or f"{kind}-{port}"),
            role=kind,
            model_path=model_path(settings.model.path),
            routers=routers,
            store=check_name("--store-name", store_name or store_socket.stem),
            store_socket=store_socket.absolute(),
            key_file=key_file.absolute(),
            port=port,
        )

    def ready(info: WorkerInfo) -> None:
        announce_ready(f"worker {info.name} at {info.url}, {info.engine.kv_tokens} KV tokens")

    with claims:
        run(run_worker(settings, plan, ready=ready))
