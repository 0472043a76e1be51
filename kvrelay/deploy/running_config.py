"""The configuration of a cluster that runs here, read from outside: what its router was started with. It must never ask
or disturb the router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvrelay.config import Config
from kvrelay.config_text import parse
from kvrelay.deploy.ports import routers_at
from kvrelay.errors import Misconfigured

_OPEN = {
    "cluster": {"prefill", "decode", "colocated", "stores"},
    "router": {"port", "control_port", "replicas", "learned_file"},
    "model": {"path", "dtype"},
    "mock": {"enabled", "control_port", "time_scale", "device"},
}
"""What flags of `kvrelay up` set, or it chooses itself: clusters of one file may differ in it."""


def running_at(port: int) -> Config | None:
    """What the routers at ``port`` were started with; None when there are none, or it cannot be read or is not all."""
    found = filter(None, map(_started_with, sorted(routers_at(port))))
    return next((config for config in found if config.router.port == port), None)


def may_run(pid: int, config: Config) -> bool:
    """Whether the router ``pid`` may be of a cluster that ``config`` describes, as far as can be seen."""
    running = _started_with(pid)
    return running is None or _decisive(running) == _decisive(config)


def _started_with(pid: int) -> Config | None:
    """The file that the router ``pid`` was given; flags over it do not count."""
    try:
        process = psutil.Process(pid)
        words = process.cmdline()
        if "--config" not in words[:-1]:
            return Config()
        return parse(Path(process.cwd(), words[words.index("--config") + 1]).read_text(encoding="utf-8"))
    except (psutil.Error, OSError, UnicodeDecodeError, Misconfigured):
        return None


def _decisive(config: Config) -> dict[str, Any]:
    """``config`` without what is open."""
    tree: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return {
        section: {key: value for key, value in keys.items() if key not in _OPEN.get(section, ())}
        for section, keys in tree.items()
    }
