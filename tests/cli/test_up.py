"""What ``kvrelay up`` prints, around a cluster that is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cli.drain import DEFAULT_ROUTER
from kvrelay.cli.startup import StartupView
from kvrelay.cli.terminal import console
from kvrelay.cli.up import _drain_example, _serve
from kvrelay.config import Config
from kvrelay.deploy import local
from kvrelay.deploy.crew import OnProgress
from kvrelay.deploy.progress import STARTING
from kvrelay.errors import Lost

RUN_DIR = Path("/run") / ("[a] long name " * 9) / "r"


class Doomed:
    """A cluster that gets a run directory and one step further."""

    def __init__(self, config: Config, *, on_run_dir: Callable[[Path], None], on_progress: OnProgress) -> None:
        self._on_run_dir = on_run_dir
        self._on_progress = on_progress

    async def __aenter__(self) -> None:
        self._on_run_dir(RUN_DIR)
        self._on_progress("store-0", STARTING)
        raise Lost("enough")

    async def __aexit__(self, *_: object) -> None: ...


async def test_the_first_line_of_up_is_the_run_directory_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LocalCluster", Doomed)
    with console.capture() as captured, pytest.raises(Lost, match="enough"):
        await _serve(Config(), StartupView(console))
    lines = captured.get().splitlines()
    assert lines[0] == f"Run directory: {RUN_DIR} (logs, store sockets, key)"
    assert "store-0: " in lines[1]


@pytest.mark.parametrize(
    ("controls", "flags"),
    [
        ([DEFAULT_ROUTER], ""),
        ([DEFAULT_ROUTER, "127.0.0.1:7081"], f" --router {DEFAULT_ROUTER} --router 127.0.0.1:7081"),
    ],
)
def test_the_command_to_empty_a_worker_is_shown_with_what_it_needs(controls: list[str], flags: str) -> None:
    cluster: Any = SimpleNamespace(controls=controls, run=SimpleNamespace(key="/run/key"))
    assert _drain_example(cluster).endswith(f"drain WORKER --key-file /run/key{flags}")
