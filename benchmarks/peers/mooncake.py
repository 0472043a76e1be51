"""Mooncake beside our stores: its TransferEngine over TCP and its Store, in an environment of their own.

Some of its sockets bind to all interfaces: it is started in a network namespace only. A machine that cannot run it is
told what it lacks, and measures without.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import peer_python
from benchmarks.progress import Say
from benchmarks.routers import enclosure

Figures = dict[str, Any]
PACKAGES = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
DEBIAN_PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Packages with libraries that its modules are linked with and its wheel does not bring."""
LEFT_OUT = "left_out"
"""Instead of figures: why there are none."""
_TAIL_CHARACTERS = 4000
_LONGEST_S = 600.0
"""One run takes less than a minute where nothing hangs."""
_ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str:
    """Why this machine cannot run it; empty when it can."""
    missing = [package for library, package in DEBIAN_PACKAGES.items() if not _loads(library)]
    return f"it needs {' '.join(missing)} of Debian" if missing else enclosure.why_not()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def engine(say: Say) -> Figures:
    """Median GB/s of each load of ``benchmarks.links``."""
    return _run("benchmarks.peers.mooncake_engine", say)


def store(say: Say) -> Figures:
    """Median ms of ``put``, ``get`` and ``exists``, with the pages and names of ``benchmarks.store``."""
    return _run("benchmarks.peers.mooncake_store", say)


def _run(module: str, say: Say) -> Figures:
    """Raises ``RuntimeError`` with the end of what the module said when it fails."""
    reason = why_not()
    if reason:
        return _without(reason, say)
    try:
        python = peer_python("mooncake", PACKAGES, say)
    except subprocess.CalledProcessError:
        return _without(f"pip cannot install {' '.join(PACKAGES)}", say)
    command = enclosure.command([str(python), "-m", module])
    ended = _ended(command)
    if ended.returncode:
        raise RuntimeError(f"{module} ended with {ended.returncode}:\n{ended.stderr[-_TAIL_CHARACTERS:]}")
    figures: Figures = json.loads(ended.stdout.splitlines()[-1])
    return figures


def _ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Raises ``RuntimeError`` when it takes longer than ``_LONGEST_S``. Nothing that it started outlives it then: that
    would hold the pipes which we read to their end."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, process_group=0)
    try:
        output, errors = process.communicate(timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command[-2:])} was not over after {_LONGEST_S:g} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _without(reason: str, say: Say) -> Figures:
    say(f"without Mooncake: {reason}")
    return {LEFT_OUT: reason}
