"""The example that uses a store from a script, as a reader would run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.conftest import KEY, StoreProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "store_client.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=30)


def test_the_store_example_puts_and_gets_pages(start_store: Callable[..., StoreProcess], tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    done = run(str(start_store(pages=100).socket_path), str(tmp_path / "key"))
    assert done.returncode == 0, done.stderr
    assert "stored: [True, True, True]\nintact: True\nshared: [True, False]\n" in done.stdout


def test_the_store_example_says_in_a_line_that_there_is_no_key(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.sock"), str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot read the key file {tmp_path / 'none'}: No such file or directory")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_store_example_says_in_a_line_that_the_store_has_another_key(
    start_store: Callable[..., StoreProcess], tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(b"another " * 4)
    (tmp_path / "key").chmod(0o600)
    done = run(str(start_store(pages=100).socket_path), str(tmp_path / "key"))
    assert done.returncode == 1
    assert "no store: " in done.stderr
    assert "the peer does not hold this cluster's key" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_store_example_says_why_when_there_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    done = run(str(tmp_path / "none.sock"), str(tmp_path / "key"))
    assert done.returncode == 1
    assert "cannot connect to" in done.stderr
