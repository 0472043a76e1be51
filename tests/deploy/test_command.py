"""Tests of deploy/command.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.deploy.command import typed_as


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / ".venv" / "bin" / "kvrelay"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_command_below_this_folder_is_typed_with_its_relative_path(script: Path, tmp_path: Path) -> None:
    assert typed_as(str(script), tmp_path, "/usr/bin") == ".venv/bin/kvrelay"
    assert typed_as(".venv/bin/kvrelay", tmp_path, "/usr/bin") == ".venv/bin/kvrelay"


def test_a_command_elsewhere_is_typed_whole(script: Path) -> None:
    assert typed_as(str(script), Path("/usr"), "/usr/bin") == str(script)


def test_a_command_on_the_path_is_typed_by_its_name(script: Path, tmp_path: Path) -> None:
    assert typed_as(str(script), tmp_path, str(script.parent)) == "kvrelay"


@pytest.mark.parametrize("started", ["/site-packages/kvrelay/__main__.py", "/usr/bin/pytest", "-c"])
def test_what_was_not_started_as_kvrelay_says_kvrelay(started: str, tmp_path: Path) -> None:
    assert typed_as(started, tmp_path, "") == "kvrelay"
