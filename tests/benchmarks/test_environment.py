"""Tests of benchmarks/peers/environment.py: a peer's environment is made once, and lies outside the product's."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from benchmarks.peers.environment import peer_python


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_an_environment_sees_the_products_packages_and_is_not_made_twice(cache: Path) -> None:
    said: list[str] = []
    python = peer_python("bare", ("pip",), said.append)
    assert cache in python.parents
    seen = subprocess.run([python, "-c", "import sys; print(sys.path)"], check=True, capture_output=True, text=True)
    assert sysconfig.get_path("purelib") in seen.stdout
    assert peer_python("bare", ("pip",), said.append) == python
    assert len(said) == 1


def test_an_environment_of_the_same_requirements_is_used_as_it_is(cache: Path) -> None:
    folder = cache / "kvrelay" / "peers" / "made"
    folder.mkdir(parents=True)
    (folder / "done").write_text("\n".join(("x==1", sysconfig.get_path("purelib"))))
    assert peer_python("made", ("x==1",), pytest.fail) == folder / "bin" / "python"
