"""Tests of deploy/local.py, with real engines of a tiny model.

Starting engines is what takes the time: one cluster serves all tests, in their order; the last one destroys it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.local import LocalCluster, WorkerView
from kvrelay.deploy.progress import Progress
from kvrelay.deploy.tiny import make_tiny
from kvrelay.types import Role
from tests.deploy.processes import all_dead, mapped, tree
from tests.patience import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: unix sockets live in it."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, Progress]]:
    """What the cluster said of its start."""
    return []


STARTED_S = 200.0
"""Longest start of an engine on a loaded machine."""


def config(**cluster: int) -> Config:
    return Config(
        model=ModelConfig(dtype="float32", name="tiny"),
        router=RouterConfig(port=0, control_port=0, api_keys=("acme:k1",)),
        store=StoreConfig(arena_bytes=64 << 20),
        worker=WorkerConfig(kv_cache_bytes=32 << 20, start_wait_s=200),
        cluster=ClusterConfig(**cluster),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny: Path, run_dir: Path, steps: list[tuple[str, Progress]]) -> AsyncIterator[LocalCluster]:
    """P and D, serving; after them nothing but their logs is left."""

    def follow(name: str, step: Progress) -> None:
        steps.append((name, step))

    async with LocalCluster(config(), run_dir=run_dir, model=tiny, on_progress=follow) as made:
        everything = [process for name in made.names for process in tree(made.pid(name))[1:]]
        yield made
    assert await all_dead(everything)
    assert sorted(path.name for path in run_dir.iterdir()) == ["logs"]


def worker(cluster: LocalCluster, role: Role) -> WorkerView:
    return next(worker for worker in cluster.workers if worker.role is role)


async def status(url: str, body: dict[str, Any] | None = None, key: str = "") -> int:
    """Status of a POST of ``body``, of a GET without one."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as http, http.request(method, url, headers=headers, json=body) as response:
        return response.status


async def test_a_cluster_serves_with_one_prefill_and_one_decode_worker(
    cluster: LocalCluster, steps: list[tuple[str, Progress]]
) -> None:
    assert {worker.name: worker.role for worker in cluster.workers} == {
        "prefill-0": Role.PREFILL,
        "decode-0": Role.DECODE,
    }
    assert list(cluster.stores) == ["store-0"]
    assert {name for name, step in steps if step.ready} == set(cluster.names)
    body = {"model": "tiny", "prompt": "What is the capital of France? " * 12, "max_tokens": 8, "ignore_eos": True}
    headers = {"authorization": "Bearer k1"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{cluster.url}/v1/completions", json=body) as response,
    ):
        answer = await response.json()
    assert response.status == 200, answer
    assert answer["usage"]["completion_tokens"] == 8
    assert "cached_tokens" in answer["usage"]["prompt_tokens_details"]


async def test_what_holds_keys_is_readable_by_its_owner_alone(cluster: LocalCluster) -> None:
    assert cluster.run.config.read_text().count("acme:k1") == 1
    assert [path.stat().st_mode & 0o077 for path in (cluster.run.config, cluster.run.key)] == [0, 0]


async def test_engines_answer_holders_of_the_engine_key_alone(cluster: LocalCluster) -> None:
    url, key = worker(cluster, Role.DECODE).url, cluster.engine_key
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 1, "token_ids": [5], "sampling_params": {}}
    posts = ["/v1/completions", "/inference/v1/generate", "/invocations", "/tokenize", "/v1/completions/render"]
    assert [await status(url + path, ask) for path in posts] == [401] * len(posts)
    assert [await status(url + path, ask, "wrong") for path in posts] == [401] * len(posts)
    assert [await status(url + path) for path in ("/v1/models", "/version", "/openapi.json")] == [401] * 3
    assert [await status(url + path) for path in ("/health", "/metrics")] == [200, 200]
    assert await status(url + "/v1/completions", ask, key) == 200
    for process in tree(worker(cluster, Role.DECODE).pid):
        assert not any(key in word for word in process.cmdline())


async def test_an_engine_is_pinned_and_dies_with_a_killed_supervisor_and_so_does_its_shared_memory(
    cluster: LocalCluster,
) -> None:
    supervisor, *engine = tree(worker(cluster, Role.DECODE).pid)
    assert len(engine) >= 3
    pinned = {tuple(process.cpu_affinity()) for process in engine}
    others = {tuple(process.cpu_affinity()) for process in tree(worker(cluster, Role.PREFILL).pid)[1:]}
    assert len(pinned) == len(others) == 1
    if (os.cpu_count() or 1) > 1:
        assert pinned != others
    memory = {name for process in engine for name in mapped(process)}
    assert memory
    os.kill(supervisor.pid, signal.SIGKILL)
    assert await all_dead(engine, within_s=10)
    assert [name for name in memory if Path(name).exists()] == []
    async with supervised(cluster):
        await is_back(cluster, "decode-0", supervisor.pid)


@pytest.mark.parametrize("name", ["store-0", "router"])
async def test_a_store_and_an_only_router_that_are_killed_come_back(cluster: LocalCluster, name: str) -> None:
    async with supervised(cluster):
        before = cluster.pid(name)
        os.kill(before, signal.SIGKILL)
        await is_back(cluster, name, before)


@asynccontextmanager
async def supervised(cluster: LocalCluster) -> AsyncIterator[None]:
    """As under ``kvrelay up``, which goes on."""
    supervising = asyncio.create_task(cluster.wait())
    try:
        yield
        assert not supervising.done()
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


async def is_back(cluster: LocalCluster, name: str, before: int) -> None:
    """Another process than ``before`` serves under the name, all are ready, and a request is answered."""
    await until(lambda: cluster.pid(name) != before)
    async with asyncio.timeout(STARTED_S):
        while cluster.log(name).read_text().count("kvrelay ready:") < 2 or await health(cluster) != "ok":
            await asyncio.sleep(0.1)
    ask = {"model": "tiny", "prompt": f"What became of {name}? " * 12, "max_tokens": 2, "ignore_eos": True}
    assert await status(f"{cluster.url}/v1/completions", ask, "k1") == 200


async def health(cluster: LocalCluster) -> str:
    """What the router says; empty while there is none."""
    with suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(f"{cluster.url}/health") as response:
            return str((await response.json())["status"])
    return ""


async def test_the_crash_of_an_engine_ends_its_worker_which_is_started_again_and_its_log_is_named(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    before = worker(cluster, Role.PREFILL).pid
    _supervisor, *processes = tree(before)
    (engine,) = (process for process in processes if "EngineCore" in process.name())
    async with supervised(cluster):
        engine.kill()
        await is_back(cluster, "prefill-0", before)
    told = f"prefill-0 died (exited with status 1) and is started again now; its log: {cluster.log('prefill-0')}"
    assert told in caplog.text
    assert await all_dead(processes)
