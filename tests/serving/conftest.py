"""Real engines, started once a session: an unsplit baseline, and a split cluster for each topology."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.server import plain_engine
from kvrelay.deploy.tiny import make_tiny
from tests.serving import tiny
from tests.serving.probe import Probe

CHUNK = 256
"""Token budget of a step: a prompt of 1,200 tokens is five chunks."""
KV_BYTES = 512 << 20
MODEL = "smollm2"


def config(stores: int = 1, prefill: int = 1, decode: int = 1) -> Config:
    """A split cluster in float32, so that equal answers are equal to the byte."""
    return Config(
        model=ModelConfig(dtype="float32", name=MODEL),
        router=RouterConfig(port=0, control_port=0, local_prefill="never"),
        store=StoreConfig(arena_bytes=1 << 30, page_lease_s=5.0),
        worker=WorkerConfig(kv_cache_bytes=KV_BYTES, max_batched_tokens=CHUNK, max_model_len=2048),
        cluster=ClusterConfig(prefill=prefill, decode=decode, stores=stores),
    )


class Baseline:
    """One unsplit engine. Each question is asked once; its answer is kept."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http
        self._answers: dict[str, Any] = {}

    async def ask(self, route: str, body: dict[str, Any]) -> Any:
        key = route + json.dumps(body, sort_keys=True)
        if key not in self._answers:
            async with self._http.post(self.url + route, json=body) as response:
                assert response.status == 200, await response.text()
                self._answers[key] = await response.json()
        return self._answers[key]


@pytest.fixture(scope="session")
def model() -> Path:
    return fetch()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Each request dials anew: an engine closes an idle connection after 5 s, perhaps as the next request leaves."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90), connector=connector) as session:
        yield session


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def baseline(
    model: Path, http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Baseline]:
    spec = engine_spec(config(), model, port=free_port(), cpus=(0,))
    async with plain_engine(spec, tmp_path_factory.mktemp("baseline") / "log") as engine:
        yield Baseline(engine.url, http)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), tiny.SHAPE)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_baseline(
    tiny_model: Path, http: aiohttp.ClientSession, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Baseline]:
    wanted = tiny.config(arena_pages=1, kv_blocks=1024, longest=2048)
    spec = engine_spec(wanted, tiny_model, port=free_port(), cpus=(0,))
    async with plain_engine(spec, tmp_path_factory.mktemp("tiny-baseline") / "log") as engine:
        yield Baseline(engine.url, http)


@pytest_asyncio.fixture(
    scope="session", loop_scope="session", params=[(2, 1), (1, 2)], ids=["two-P-one-D", "one-P-two-D"]
)
async def shaped(request: pytest.FixtureRequest, tiny_model: Path, http: aiohttp.ClientSession) -> AsyncIterator[Probe]:
    """Pools of unlike size, in two nodes."""
    prefill, decode = request.param
    wanted = tiny.config(arena_pages=512, kv_blocks=256, prefill=prefill, decode=decode, longest=2048)
    async with LocalCluster(wanted, model=tiny_model) as cluster:
        yield Probe(cluster, http)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=[1, 2], ids=["one-store", "two-stores"])
async def probe(
    request: pytest.FixtureRequest, model: Path, http: aiohttp.ClientSession, baseline: Baseline
) -> AsyncIterator[Probe]:
    async with LocalCluster(config(stores=request.param), model=model) as cluster:
        yield Probe(cluster, http)
