"""Tests of ``kvrelay up`` as a process: how it ends, with real engines of a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kvrelay.deploy.process import Child
from kvrelay.deploy.tiny import make_tiny
from tests.deploy.processes import all_dead, tree

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: unix sockets live in it."""
    return tmp_path_factory.mktemp("run")


async def start_up(model: Path, run_dir: Path) -> Child:
    """``kvrelay up`` with one colocated worker."""
    file = run_dir / "up.toml"
    file.write_text("[router]\ncontrol_port = 0\n[worker]\nkv_cache_bytes = 33554432\n")
    flags = ["--colocated", "1", "--port", "0", "--model", str(model), "--dtype", "float32", "--config", str(file)]
    environment = {**os.environ, "KVRELAY_RUN_DIR": str(run_dir / "r"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvrelay", "up", *flags]
    return await Child.start("up", command, environment, asyncio.subprocess.PIPE)


async def read_until(child: Child, mark: str) -> str:
    assert child.output is not None
    text = ""
    while mark not in text:
        line = await child.output.readline()
        assert line, text
        text += line.decode()
    return text


async def test_ctrl_c_ends_up_and_leaves_nothing(tiny: Path, run_dir: Path) -> None:
    up = await start_up(tiny, run_dir)
    try:
        shown = await read_until(up, "Ctrl-C ends it")
        first = next(line for line in shown.splitlines() if not line.startswith("warning"))
        assert first == f"Run directory: {run_dir / 'r'} (logs, store sockets, key)"
        assert (run_dir / "r").stat().st_mode & 0o777 == 0o700
        processes = tree(up.pid)
        assert len(processes) >= 6
        os.kill(up.pid, signal.SIGINT)
        await read_until(up, "Stopped.")
        assert await up.wait() == 0
        assert await all_dead(processes)
        assert sorted(path.name for path in (run_dir / "r").iterdir()) == ["logs"]
    finally:
        await up.stop(grace_s=20)


async def test_killing_up_while_it_starts_leaves_no_process(tiny: Path, run_dir: Path) -> None:
    up = await start_up(tiny, run_dir)
    try:
        await read_until(up, "importing vLLM")
        processes = tree(up.pid)
        assert any("engine_main" in " ".join(process.cmdline()) for process in processes)
        os.kill(up.pid, signal.SIGKILL)
        assert await all_dead(processes, within_s=20)
    finally:
        await up.stop(grace_s=1)


async def test_an_engine_that_cannot_start_is_told_with_its_error_and_its_log(tiny: Path, run_dir: Path) -> None:
    broken = run_dir / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    settings = (broken / "config.json").read_text()
    (broken / "config.json").write_text(settings.replace('"silu"', '"no-such-one"'))
    up = await start_up(broken, run_dir)
    try:
        text = await read_until(up, "error: ")
        assert up.output is not None
        text += (await up.output.read()).decode()
        assert await up.wait() == 1
    finally:
        await up.stop(grace_s=20)
    log = run_dir / "r" / "logs" / "both-0.log"
    assert "both-0 died (exited with status 1)" in text
    assert str(log) in text
    assert "Unsupported activation: no-such-one" in text
    assert "Unsupported activation: no-such-one" in log.read_text()
