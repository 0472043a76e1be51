"""A mock worker in a network namespace of its own, behind a real router: its packets are lost, its answers are not."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.chaos.network import NetworkVictims
from kvrelay.deploy.chaos.script import Deed
from kvrelay.deploy.key import write_secret
from kvrelay.deploy.mock.node import MockNode
from kvrelay.deploy.mock.roster import mock_names
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.tiny import TinyShape, make_tiny
from tests.chaos.space import FAR, NAME, NEAR, SPACE
from tests.patience import PATIENCE_S, until
from tests.router.cluster import KEY, Cluster

APART, HERE = "apart-both-0", "here-both-0"
STREAMS = 8
ANSWER_TOKENS = 150
BEGUN_TOKENS = 10
AWAY_S = 5.0
MOCK = MockConfig(time_scale=3.0, kv_tokens=16384)
CONFIG = Config(mock=MOCK, worker=WorkerConfig(load_wait_s=0.5), cluster=ClusterConfig(heartbeat_s=0.1))
FILE = f"""
[worker]
host = "{FAR}"

[mock]
time_scale = {MOCK.time_scale}
kv_tokens = {MOCK.kv_tokens}

[cluster]
heartbeat_s = 0.1
"""
COMMAND = "import sys; from kvrelay.cli import app; app(sys.argv[sys.argv.index('--') + 1 :], prog_name='kvrelay')"


@dataclass
class Sites:
    """The router, the worker beside it and the one that is apart."""

    cluster: Cluster
    node: MockNode

    async def stream(self, prompt: list[int], said: list[int]) -> None:
        """Read an answer, which is the right one, into ``said``."""
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        last, asked = b"", body | {"stream": True, "return_token_ids": True}
        async with self.cluster.http.post("/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    said += [token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]]
                last = line.strip() or last
        assert last == b"data: [DONE]"
        assert said == self.node.site.author.answer(prompt, ANSWER_TOKENS)

    async def written_apart(self) -> float:
        return await self.cluster.metric(f'kvrelay_decode_sequences{{role="both",worker="{APART}"}}')


@asynccontextmanager
async def beside(cluster: Cluster, folder: Path) -> AsyncIterator[MockNode]:
    names = mock_names(0, 0, 1, stores=1, prefix="here-")
    node = MockNode(
        Site(CONFIG, folder, cluster.tokens, stores=names.stores, routers=(cluster.control,), key=KEY), names.workers
    )
    running = asyncio.create_task(node.run(lambda _: None))
    try:
        yield node
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def in_the_namespace(cluster: Cluster, model: Path, folder: Path) -> AsyncIterator[None]:
    write_secret(folder / "key", KEY.decode())
    (folder / "apart.toml").write_text(FILE)
    words = ("mock-worker", "--size", "0x0", "--colocated", "1", "--prefix", "apart-", "--router", cluster.control)
    files = ("--model", str(model), "--key-file", str(folder / "key"), "--config", str(folder / "apart.toml"))
    python = (sys.executable, "-c", COMMAND, "kvrelay", "worker", "--name", NAME, "--", *words, *files)
    child = await asyncio.create_subprocess_exec("ip", "netns", "exec", SPACE, *python)
    try:
        yield
    finally:
        child.kill()
        await child.wait()


@pytest.fixture
async def sites(apart: None, tmp_path: Path) -> AsyncIterator[Sites]:
    model = make_tiny(tmp_path / "tiny", TinyShape(max_positions=8192))
    config = RouterConfig(port=0, control_port=0, control_host=NEAR)
    async with (
        Cluster(model, router_config=config) as cluster,
        beside(cluster, model) as node,
        in_the_namespace(cluster, model, tmp_path),
    ):
        await until(lambda: cluster.is_ready(APART) and cluster.is_ready(HERE))
        yield Sites(cluster, node)


@pytest.mark.slow
@pytest.mark.parametrize("deed", [Deed.PARTITION, Deed.LOSS])
async def test_streams_outlive_what_happens_to_the_network_of_their_worker(sites: Sites, deed: Deed) -> None:
    victims, said = NetworkVictims(kills=False), [list[int]() for _ in range(STREAMS)]
    async with asyncio.TaskGroup() as streams:
        for number, tokens in enumerate(said):
            streams.create_task(sites.stream([300 + number] * 50, tokens))
        await until(lambda: min(len(tokens) for tokens in said) >= BEGUN_TOKENS)
        assert await sites.written_apart() > 0
        await victims.hurt(NAME, deed)
        await asyncio.sleep(AWAY_S)
        streams.create_task(sites.stream([90] * 50, []))
    await victims.end()
    numbers = itertools.count(100)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as streams:
        while not await sites.written_apart():
            streams.create_task(sites.stream([next(numbers)] * 50, []))
            await asyncio.sleep(0.1)
    await sites.cluster.at_rest()
