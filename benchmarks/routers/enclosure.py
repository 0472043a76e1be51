"""A network namespace around a benchmark: nothing in it can be reached from outside, nor reaches out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_INSIDE = "KVRELAY_BENCH_ENCLOSED"
_UNSHARE = ("unshare", "--map-root-user", "--net")


def inside() -> bool:
    return _INSIDE in os.environ


def why_not() -> str:
    """Why this machine cannot make one; empty when it can."""
    missing = [tool for tool in ("unshare", "ip") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install util-linux and iproute2"
    tried = subprocess.run([*_UNSHARE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def command(words: Sequence[str]) -> list[str]:
    """What runs ``words`` inside."""
    return [*_UNSHARE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]


def enter(module: str, arguments: Sequence[str]) -> None:
    """Become ``python -m module arguments`` inside; does not return."""
    words = command([sys.executable, "-m", module, *arguments])
    os.execvpe(words[0], words, {**os.environ, _INSIDE: "1"})
