"""Tests of deploy/worker.py: a worker with a stand-in for vLLM, registered at a real router."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrelay.config import ClusterConfig, Config, RouterConfig, WorkerConfig
from kvrelay.connector.engine import write_engine_file
from kvrelay.deploy import server
from kvrelay.deploy.engine import EngineSpec, engine_command
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.tiny import make_tiny
from kvrelay.deploy.worker import WorkerPlan, run_worker
from kvrelay.errors import Misconfigured
from kvrelay.protocol.engine import engine_key
from kvrelay.types import Engine, Role, WorkerInfo
from tests.deploy import fake_engine
from tests.fleet.values import engine
from tests.patience import until
from tests.router.cluster import KEY, Cluster


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(tiny: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tiny) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start ``fake_engine`` instead of vLLM, and keep temporary folders below ``tmp_path``."""

    def command(spec: EngineSpec) -> list[str]:
        return [sys.executable, fake_engine.__file__, *engine_command(spec)[4:]]

    monkeypatch.setattr(server, "engine_command", command)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(fake_engine.ENGINE_VARIABLE, msgspec.json.encode(engine()).decode())
    monkeypatch.setenv("VLLM_API_KEY", "of-the-operators-shell")


def plan_of(tiny: Path, tmp_path: Path, *routers: str) -> WorkerPlan:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    return WorkerPlan(
        name="p1",
        role=Role.PREFILL,
        model_path=tiny,
        routers=routers,
        store="s1",
        store_socket=tmp_path / "s",
        key_file=key_file,
        port=free_port("127.0.0.2"),
    )


@contextlib.asynccontextmanager
async def running(plan: WorkerPlan, **settings: Any) -> AsyncIterator[WorkerInfo]:
    """The worker of ``plan``, once it has said that it is ready."""
    config = Config(worker=WorkerConfig(**settings), cluster=ClusterConfig(heartbeat_s=0.1))
    ready: asyncio.Future[WorkerInfo] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_worker(config, plan, ready=ready.set_result, sink=lambda _line: None))
    try:
        while not ready.done() and not task.done():
            await asyncio.sleep(0.01)
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def told(url: str) -> dict[str, Any]:
    """What the stand-in at ``url`` was started with."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/what") as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        return answer


async def test_a_worker_on_another_address_is_reached_by_the_router_there(
    cluster: Cluster, tiny: Path, tmp_path: Path
) -> None:
    plan = plan_of(tiny, tmp_path, cluster.control)
    async with running(plan, host="127.0.0.2") as info:
        assert info.url == f"http://127.0.0.2:{plan.port}"
        await until(lambda: cluster.is_ready("p1"))
        member = cluster.router.brain.fleet.workers.get("p1")
        assert member is not None
        assert member.info == info
        assert "--kv-transfer-config" in (await told(info.url))["arguments"]
        with pytest.raises(aiohttp.ClientConnectorError):
            await told(f"http://127.0.0.1:{plan.port}")
    await until(lambda: not cluster.is_ready("p1"))


async def test_an_advertised_address_is_what_routers_are_told(tiny: Path, tmp_path: Path) -> None:
    plan = plan_of(tiny, tmp_path)
    async with running(plan, host="0.0.0.0", advertise=f"localhost:{plan.port}") as info:
        assert info.url == f"http://localhost:{plan.port}"
        assert (await told(info.url))["arguments"]


async def test_an_engine_gets_the_clusters_key_through_its_environment_alone(tiny: Path, tmp_path: Path) -> None:
    async with running(plan_of(tiny, tmp_path)) as info:
        given = await told(info.url)
    assert given["api_key"] == engine_key(KEY)
    assert not any(engine_key(KEY) in word for word in given["arguments"])
    assert "kvrelay.deploy.engine_guard.EngineGuard" in given["arguments"]


async def test_every_address_needs_one_to_tell(tiny: Path, tmp_path: Path) -> None:
    config = Config(worker=WorkerConfig(host="0.0.0.0"))
    with pytest.raises(Misconfigured, match=r"set worker\.advertise"):
        await run_worker(config, plan_of(tiny, tmp_path))


async def test_routers_hear_of_new_weights_once(cluster: Cluster, tiny: Path, tmp_path: Path) -> None:
    async with running(plan_of(tiny, tmp_path, cluster.control)) as info:
        await until(lambda: cluster.is_ready("p1"))
        (file,) = tmp_path.glob("worker-*/engine.json")
        changed = with_epoch(info.engine, 7)
        write_engine_file(file, changed)
        workers = cluster.router.brain.fleet.workers
        await until(lambda: (member := workers.get("p1")) is not None and member.info.engine == changed)
        member = workers.get("p1")
        assert member is not None
        assert member.info.incarnation == info.incarnation
        await until(lambda: cluster.is_ready("p1"))
        await asyncio.sleep(0.5)
        assert workers.get("p1") is member, "it was registered once, not with every heartbeat"
    assert list(tmp_path.glob("worker-*")) == list(tmp_path.glob("vllm-*")) == []


async def test_a_router_that_starts_later_learns_that_a_worker_drains(
    cluster: Cluster, tiny: Path, tmp_path: Path
) -> None:
    later = RouterConfig(port=0, control_port=free_port("127.0.0.1"))
    async with running(plan_of(tiny, tmp_path, cluster.control, f"127.0.0.1:{later.control_port}")):
        await until(lambda: cluster.is_ready("p1"))
        cluster.router.brain.drains.begin("p1", time.monotonic())
        async with Cluster(tiny, router_config=later) as other:
            await until(lambda: other.drains("p1"))
            other.router.brain.drains.undo("p1")
            await until(lambda: cluster.is_ready("p1"))
            assert not other.drains("p1")


async def test_a_worker_whose_engine_file_vanishes_goes_on_serving(
    cluster: Cluster, tiny: Path, tmp_path: Path
) -> None:
    async with running(plan_of(tiny, tmp_path, cluster.control)) as info:
        await until(lambda: cluster.is_ready("p1"))
        (file,) = tmp_path.glob("worker-*/engine.json")
        file.unlink()
        await asyncio.sleep(0.5)
        await until(lambda: cluster.is_ready("p1"))
        assert (await told(info.url))["arguments"]
        changed = with_epoch(info.engine, 7)
        write_engine_file(file, changed)
        workers = cluster.router.brain.fleet.workers
        await until(lambda: (member := workers.get("p1")) is not None and member.info.engine == changed)


def with_epoch(engine: Engine, epoch: int) -> Engine:
    fingerprint = msgspec.structs.replace(engine.fingerprint, weights_epoch=epoch)
    return msgspec.structs.replace(engine, fingerprint=fingerprint)
