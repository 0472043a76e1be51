"""Tests of deploy/local.py and of ``kvrelay up``, with real engines of a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
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
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: unix sockets live in it."""
    return tmp_path_factory.mktemp("run")


def config(**cluster: int) -> Config:
    return Config(
        model=ModelConfig(dtype="float32", name="tiny"),
        router=RouterConfig(port=0, control_port=0),
        store=StoreConfig(arena_bytes=64 << 20),
        worker=WorkerConfig(kv_cache_bytes=32 << 20, start_wait_s=200),
        cluster=ClusterConfig(**cluster),
    )


def tree(pid: int) -> list[psutil.Process]:
    """The process ``pid`` and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


async def all_dead(processes: list[psutil.Process], within_s: float = 5.0) -> bool:
    """Whether ``processes`` end in time; a zombie that init has not looked at yet is dead."""
    _gone, rest = await asyncio.to_thread(psutil.wait_procs, processes, within_s)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in rest)


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

        decoder = tree(before["decode-0"].pid)
        assert len(decoder) >= 4
        await cluster.kill("decode-0")
        assert await all_dead(decoder)
        await cluster.restart("decode-0")
        after = {worker.name: worker for worker in cluster.workers}
        assert after["decode-0"].url == before["decode-0"].url
        assert after["decode-0"].pid != before["decode-0"].pid
        assert await ask(cluster.url, prompt) == text
        everything = [process for name in cluster.names for process in tree(cluster.pid(name))]
    assert await all_dead(everything)
    assert sorted(path.name for path in run_dir.iterdir()) == ["logs"]


async def start_up(tiny: Path, run_dir: Path) -> Child:
    """``kvrelay up`` with one colocated worker."""
    file = run_dir / "up.toml"
    file.write_text("[router]\ncontrol_port = 0\n[worker]\nkv_cache_bytes = 33554432\n")
    flags = ["--colocated", "1", "--port", "0", "--model", str(tiny), "--dtype", "float32", "--config", str(file)]
    environment = {**os.environ, "KVRELAY_RUN_DIR": str(run_dir / "r"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvrelay", "up", *flags]
    return await Child.start("up", command, environment, asyncio.subprocess.PIPE)


@pytest.fixture
async def up(tiny: Path, run_dir: Path) -> AsyncIterator[Child]:
    """A serving ``kvrelay up``."""
    child = await start_up(tiny, run_dir)
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


async def read_rest(child: Child) -> str:
    assert child.output is not None
    return (await child.output.read()).decode()


async def test_ctrl_c_ends_up_and_leaves_nothing(up: Child, run_dir: Path) -> None:
    processes = tree(up.pid)
    assert len(processes) >= 6
    os.kill(up.pid, signal.SIGINT)
    await read_until(up, "Stopped.")
    assert await up.wait() == 0
    assert await all_dead(processes)
    assert sorted(path.name for path in (run_dir / "r").iterdir()) == ["logs"]


async def test_the_crash_of_an_engine_ends_up_with_its_log_and_leaves_nothing(up: Child, run_dir: Path) -> None:
    processes = tree(up.pid)
    engines = [process for process in processes if "EngineCore" in process.name()]
    assert len(engines) == 1
    engines[0].kill()
    text = await read_until(up, "error: ") + await read_rest(up)
    assert await up.wait() == 1
    assert f"its log is {run_dir}/r/logs/both-0.log and ends with" in text
    assert "error: the engine at http://127.0.0.1" in text
    assert await all_dead(processes)


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


async def test_an_engine_that_cannot_start_is_told_with_its_log_and_the_cause(tiny: Path, run_dir: Path) -> None:
    broken = run_dir / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    settings = (broken / "config.json").read_text()
    (broken / "config.json").write_text(settings.replace('"LlamaForCausalLM"', '"NoSuchModel"'))
    with pytest.raises(Lost, match=r"both-0 exited with status 1; its log is .*both-0\.log and ends with") as caught:
        async with LocalCluster(config(prefill=0, decode=0, colocated=1), run_dir=run_dir / "r", model=broken):
            pytest.fail("it served")
    assert "died while it started" in str(caught.value)
    assert "NoSuchModel" in str(caught.value)
    assert (run_dir / "r" / "logs" / "both-0.log").exists()
