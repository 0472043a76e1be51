"""Tests of the command line, as a person runs it: real processes, their output and exit status."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli import app
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.tiny import make_tiny

COMMANDS = [["up"], ["ask"], ["demo"], ["doctor"], ["store"], ["router"], ["worker"], ["model", "fetch"]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty cache: no model was fetched."""
    return tmp_path / "cache"


def kvrelay(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "kvrelay", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_page_has_an_example(command: list[str]) -> None:
    page = CliRunner().invoke(app, [*command, "--help"])
    assert page.exit_code == 0
    assert f"Example:  kvrelay {' '.join(command)}" in page.output


def test_without_a_command_the_first_steps_are_shown() -> None:
    assert "kvrelay model fetch;  kvrelay up;" in kvrelay().stdout


def test_an_unknown_key_of_the_configuration_gets_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text("[worker]\nmax_batch_tokens = 3\n")
    result = kvrelay("up", "--config", str(file))
    assert result.returncode == 1
    assert "'worker.max_batch_tokens'; did you mean 'max_batched_tokens'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_value_out_of_range_is_refused_by_its_name() -> None:
    result = kvrelay("up", "--port", "99999")
    assert result.returncode == 1
    assert "<= 65535" in result.stderr
    assert "router.port" in result.stderr


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    result = kvrelay("up", "--config", str(tmp_path / "none.toml"))
    assert result.returncode == 1
    assert f"cannot read the configuration file {tmp_path}/none.toml" in result.stderr


def test_a_port_in_use_is_told_with_its_holder(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        result = kvrelay("up", "--port", str(port), "--model", str(make_tiny(tmp_path / "tiny")))
    assert result.returncode == 1
    assert f"port {port} is in use by pid {os.getpid()} (" in result.stderr
    assert "choose another port with --port" in result.stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "run: kvrelay model fetch"),
        (["--model", "/no/such/folder"], "no model folder at /no/such/folder"),
    ],
)
def test_a_missing_model_says_what_to_run(flags: list[str], text: str, cache: Path) -> None:
    result = kvrelay("up", "--port", "0", *flags, cache=cache)
    assert result.returncode == 1
    assert text in result.stderr
    assert "kvrelay model fetch" in result.stderr


def test_asking_where_nobody_answers_says_what_to_run() -> None:
    result = kvrelay("ask", "hi", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.returncode == 1
    assert "start a cluster: kvrelay up" in result.stderr


def test_a_worker_without_a_key_says_so(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path / "tiny"))
    flags = ["--store-socket", str(tmp_path / "s"), "--key-file", str(tmp_path / "none"), "--model", model]
    result = kvrelay("worker", *flags)
    assert result.returncode == 1
    assert f"cannot read the key file {tmp_path}/none" in result.stderr


def test_the_doctor_names_what_is_missing(cache: Path) -> None:
    result = kvrelay("doctor", cache=cache)
    assert result.returncode == 1
    row = next(line for line in result.stdout.splitlines() if " model " in line)
    assert row.startswith("bad")
    assert "kvrelay model fetch" in row


def test_the_doctor_knows_who_holds_a_port() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", 7080))
        except OSError:
            pytest.skip("port 7080 is held by another process")
        sock.listen()
        result = kvrelay("doctor")
    assert f"in use by pid {os.getpid()}" in result.stdout
