"""What owns a folder in tests: a process that is killed, or a cluster that goes as far as its run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.config import Config, RouterConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.errors import Misconfigured

ENOUGH = "that is far enough"


class Owner:
    """Runs ``code``, which is given ``path``, says one line and sleeps."""

    def __init__(self, code: str, path: Path) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


async def start(model: Path, run_dir: Path | None = None) -> None:
    """Start a cluster that goes as far as its run directory, and no further: raises ``Misconfigured``, with ``ENOUGH``
    when it came so far."""

    def enough(_: Path) -> None:
        raise Misconfigured(ENOUGH)

    config = Config(router=RouterConfig(port=0, control_port=0))
    async with LocalCluster(config, run_dir=run_dir, model=model, on_run_dir=enough):
        pytest.fail("it served")
