"""Processes of ours started from a folder in which something else is called as the package is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvrelay import __version__
from kvrelay.deploy.engine import EngineSpec, engine_command
from kvrelay.deploy.members import Kind, Member

SPEC = EngineSpec(model_path=Path("/models/m"), served_name="m", port=1, cpus=(0,))


@pytest.fixture
def beside_decoys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has packages of these names that cannot be imported."""
    for name in ("kvrelay", "pip"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a decoy')")
    monkeypatch.chdir(tmp_path)


def said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.usefixtures("beside_decoys")
def test_a_member_is_the_package_whatever_the_current_folder_has() -> None:
    member = Member(name="router", kind=Kind.ROUTER, arguments=("--version",))
    assert said(member.command) == f"kvrelay {__version__}\n"


@pytest.mark.usefixtures("beside_decoys")
def test_an_engine_is_that_of_the_package_whatever_the_current_folder_has() -> None:
    *interpreter, dash_m, module = engine_command(SPEC)[:4]
    assert dash_m == "-m"
    assert said([*interpreter, "-c", f"import {module}"]) == ""
