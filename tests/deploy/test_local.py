"""Tests of deploy/local.py and of ``kvrelay up``, with real engines of a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.process import Child
from kvrelay.deploy.progress import Progress
from kvrelay.deploy.tiny import make_tiny
from kvrelay.errors import Lost
from kvrelay.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: unix sockets live in it."""
    yield tmp_path_factory.mktemp("run")


def config(**cluster: int) -> Config:
    return Config(
        model=ModelConfig(dtype="float32", name="tiny"),
        router=RouterConfig(port=0, control_port=0),
        store=StoreConfig(arena_bytes=64 << 20),
        worker=WorkerConfig(kv_cache_bytes=32 << 20, start_wait_s=200),
        cluster=ClusterConfig(**cluster),
    )


def alive(run_dir: Path) -> list[str]:
    """Command lines of the processes that know of ``run_dir``."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "pid"]):
        words = " ".join(process.info["cmdline"] or [])
        scratch = (process.info["environ"] or {}).get("TMPDIR", "")
        if process.pid != os.getpid() and str(run_dir) in words + scratch:
            found.append(words)
    return found


async def ask(url: str, text: str) -> str:
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["text"])


async def test_a_cluster_serves_and_a_killed_member_comes_back_on_its_port(tiny: Path, run_dir: Path) -> None:
    steps: list[tuple[str, Progress]] = []
    prompt = "What is the capital of France? " * 12
    async with LocalCluster(
        config(), run_dir=run_dir, model=tiny, on_progress=lambda name, step: steps.append((name, step))
    ) as cluster:
        before = {worker.name: worker for worker in cluster.workers}
        assert {name: worker.role for name, worker in before.items()} == {
            "prefill-0": Role.PREFILL,
            "decode-0": Role.DECODE,
        }
        assert list(cluster.stores) == ["store-0"]
        assert {name for name, step in steps if step.ready} == set(cluster.names)
        text = await ask(cluster.url, prompt)

        await cluster.kill("decode-0")
        assert not psutil.pid_exists(before["decode-0"].pid)
        await cluster.restart("decode-0")
        after = {worker.name: worker for worker in cluster.workers}
        assert after["decode-0"].url == before["decode-0"].url
        assert after["decode-0"].pid != before["decode-0"].pid
        assert await ask(cluster.url, prompt) == text
    assert alive(run_dir) == []
    assert sorted(path.name for path in run_dir.iterdir()) == ["logs"]


@pytest.fixture
async def up(tiny: Path, run_dir: Path) -> AsyncIterator[Child]:
    """``kvrelay up`` with one colocated worker, serving."""
    flags = ["--colocated", "1", "--port", "0", "--model", str(tiny), "--dtype", "float32", "--config"]
    file = run_dir / "up.toml"
    file.write_text("[router]\ncontrol_port = 0\n[worker]\nkv_cache_bytes = 33554432\n")
    environment = {**os.environ, "KVRELAY_RUN_DIR": str(run_dir / "r"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvrelay", "up", *flags, str(file)]
    child = await Child.start("up", command, environment, asyncio.subprocess.PIPE)
    try:
        await read_until(child, "Ctrl-C ends it")
        yield child
    finally:
        await child.stop(grace_s=20)


async def read_until(child: Child, mark: str) -> str:
    assert child.output is not None
    text = ""
    while mark not in text:
        line = await child.output.readline()
        assert line, text
        text += line.decode()
    return text


async def test_ctrl_c_ends_up_and_leaves_nothing(up: Child, run_dir: Path) -> None:
    assert len(alive(run_dir)) >= 5
    os.kill(up.pid, signal.SIGINT)
    await read_until(up, "Stopped.")
    assert await up.wait() == 0
    assert alive(run_dir) == []
    assert sorted(path.name for path in (run_dir / "r").iterdir()) == ["logs"]


async def test_the_crash_of_an_engine_ends_up_with_its_log_and_leaves_nothing(up: Child, run_dir: Path) -> None:
    engines = [process for process in psutil.process_iter(["name"]) if "EngineCore" in process.info["name"]]
    ours = [process for process in engines if str(run_dir) in process.environ().get("TMPDIR", "")]
    assert len(ours) == 1
    ours[0].kill()
    text = await read_until(up, "error: ") + await rest(up)
    assert await up.wait() == 1
    assert f"its log is {run_dir}/r/logs/both-0.log and ends with" in text
    assert "the engine at http://127.0.0.1" in text
    assert alive(run_dir) == []


async def rest(child: Child) -> str:
    assert child.output is not None
    return (await child.output.read()).decode()


async def test_killing_up_itself_leaves_no_process(up: Child, run_dir: Path) -> None:
    os.kill(up.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while [words for words in alive(run_dir) if "multiprocessing" not in words]:
            await asyncio.sleep(0.1)


async def test_an_engine_that_cannot_start_is_told_with_its_log(tiny: Path, run_dir: Path) -> None:
    broken = run_dir / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "config.json").write_text(
        (broken / "config.json").read_text().replace('"hidden_size": 128', '"hidden_size": 64')
    )
    with pytest.raises(Lost, match=r"both-0 exited with status 1; its log is .*both-0\.log and ends with") as caught:
        async with LocalCluster(config(prefill=0, decode=0, colocated=1), run_dir=run_dir / "r", model=broken):
            pytest.fail("it served")
    assert "died while it started" in str(caught.value)
    assert alive(run_dir) == []
