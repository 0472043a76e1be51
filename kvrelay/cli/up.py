"""``kvrelay up``: a whole cluster on this machine."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.drain import DEFAULT_ROUTER
from kvrelay.cli.mock import Device, TimeScale
from kvrelay.cli.settings import ConfigFile, Model, load
from kvrelay.cli.startup import StartupView
from kvrelay.cli.terminal import announce_stop, console, errors, reported, run
from kvrelay.config import Config
from kvrelay.deploy import cores
from kvrelay.deploy.command import program
from kvrelay.deploy.mock.roster import parse_size
from kvrelay.deploy.startable import require_cluster, require_sound
from kvrelay.errors import Misconfigured

if TYPE_CHECKING:
    from kvrelay.deploy.local import LocalCluster


def up(
    prefill: Annotated[int | None, typer.Option(help="Prefill workers: they read prompts. Default 1.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers: they write answers. Default 1.")] = None,
    colocated: Annotated[int | None, typer.Option(help="Workers that do both, instead of a split.")] = None,
    stores: Annotated[
        int | None,
        typer.Option(help="1: one page store; 2: one for each pool; between them go shared memory, NIXL or TCP."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI API; 0 takes a free one. Default 8000.")] = None,
    control_port: Annotated[
        int | None, typer.Option(help="Port at which workers and stores register; 0 takes a free one. Default 7080.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Router processes behind that port; one that dies is started again. Default 1.")
    ] = None,
    mock: Annotated[
        str, typer.Option(help="PxD simulated workers, e.g. 16x16, instead of engines.", show_default=False)
    ] = "",
    time_scale: TimeScale = None,
    device: Device = "",
    model: Model = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.", show_default=False)] = "",
    config: ConfigFile = None,
) -> None:
    """Start store, workers and router on this machine, until Ctrl-C; nothing is left behind.

    Each worker is a vLLM engine pinned to its own cores. The first line names the run directory, which holds logs,
    the stores' sockets and the key; set KVRELAY_RUN_DIR to choose it and keep it. What the router learns of timings is
    kept in ~/.cache/kvrelay/learned for the next cluster that is set up alike (router.learned_file).

    With --mock no engine is started: simulated workers answer nonsense, in the time that an 8B model on --device takes,
    so that a large cluster, and what goes wrong in it (kvrelay fault), can be tried on a laptop.

    Example:  kvrelay up --prefill 2 --decode 1 --port 9000
    """
    with reported():
        simulated = {"time_scale": time_scale, "device": device, "enabled": True if mock else None}
        if mock:
            prefill, decode = _simulated_size(mock, prefill, decode)
        elif colocated is not None:
            prefill, decode = prefill or 0, decode or 0
        cluster = {"prefill": prefill, "decode": decode, "colocated": colocated, "stores": stores}
        given = {"path": model, "dtype": dtype}
        router = {"port": port, "control_port": control_port, "replicas": replicas}
        settings = load(config, cluster=cluster, router=router, mock=simulated, model=given)
        _require_startable(settings, config)
    if not settings.mock.enabled:
        _warn_of_few_cores(settings)
    view = StartupView(console)

    def stopping() -> None:
        view.close()
        announce_stop()

    try:
        run(_serve(settings, view), stopping)
    except SystemExit:  # rich's, once nobody reads: it has let go of the pipe
        errors.print("Stopped: nobody reads what this prints any more.")
        raise
    console.print("Stopped.")


def _require_startable(settings: Config, file: Path | None) -> None:
    """Raises ``Misconfigured``, with the file in front that the settings are from."""
    try:
        require_sound(settings)
        require_cluster(settings)
    except Misconfigured as error:
        raise Misconfigured(f"{file}: {error}" if file is not None else str(error)) from error


def _simulated_size(mock: str, prefill: int | None, decode: int | None) -> tuple[int, int]:
    """Prefill and decode workers of ``--mock``. Raises ``Misconfigured`` when another flag counts them too."""
    for flag, count in (("--prefill", prefill), ("--decode", decode)):
        if count is not None:
            raise Misconfigured(f"--mock {mock} and {flag} {count} both count workers; leave {flag} out")
    return parse_size("--mock", mock)


def _warn_of_few_cores(config: Config) -> None:
    have = len(cores.parse(config.worker.cpus) if config.worker.cpus else cores.available())
    want = config.cluster.prefill + config.cluster.decode + config.cluster.colocated
    if want > have:
        what = f"warning: {want} workers share {have} cores, so each is slower; an engine wants a core of its own"
        errors.print(what, style="yellow", soft_wrap=True)


async def _serve(config: Config, view: StartupView) -> None:
    from kvrelay.deploy.learned_files import keeping
    from kvrelay.deploy.local import LocalCluster

    config = keeping(config)
    show_run_dir = functools.partial(_show_run_dir, simulated=config.mock.enabled)
    with view:
        async with LocalCluster(config, on_run_dir=show_run_dir, on_progress=view.update) as cluster:
            view.close()
            console.print(f"\n[bold green]Serving[/bold green] at [bold]{cluster.url}[/bold] ({view.elapsed_s:.1f} s)")
            console.print(f"Logs: {cluster.run.logs}\n\nTry, in another terminal:\n", markup=False, soft_wrap=True)
            wants_key = bool(config.router.api_keys)
            console.print(_example(cluster.url, served_name(cluster), wants_key), markup=False, soft_wrap=True)
            if config.mock.enabled:
                console.print(_fault_example(cluster), markup=False, soft_wrap=True)
            console.print(_drain_example(cluster), markup=False, soft_wrap=True)
            console.print("\nCtrl-C ends it.")
            await cluster.wait()


def _fault_example(cluster: LocalCluster) -> str:
    route = f"--port {cluster.config.mock.control_port} --key-file {cluster.run.key}"
    worker = "decode-0" if cluster.config.cluster.decode else "both-0"
    return f"\nWhat can go wrong:\n\n  {program()} fault {worker} hang=true {route}"


def _drain_example(cluster: LocalCluster) -> str:
    """Each router has to be told, so control ports have to be known that are not the one that drain tries itself."""
    ports = [] if cluster.controls == [DEFAULT_ROUTER] else cluster.controls
    routers = "".join(f" --router {control}" for control in ports)
    return f"\nTo empty a worker:\n\n  {program()} drain WORKER --key-file {cluster.run.key}{routers}"


def _show_run_dir(path: Path, *, simulated: bool) -> None:
    """A path is left whole, for the clipboard. Simulated stores have no sockets there."""
    holds = "logs, key" if simulated else "logs, store sockets, key"
    console.print(f"Run directory: {path} ({holds})", markup=False, soft_wrap=True)


def served_name(cluster: LocalCluster) -> str:
    """The model id that clients use."""
    return cluster.config.model.name or Path(cluster.model).name


def _example(url: str, model: str, wants_key: bool) -> str:
    option = " --api-key KEY" if wants_key else ""
    header = " -H 'Authorization: Bearer KEY'" if wants_key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is a KV cache?"}]})
    return (
        f"  {program()} ask --url {url}{option} 'What is a KV cache?'\n\n"
        f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'"
    )
