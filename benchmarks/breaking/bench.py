"""A mock cluster as processes of its own, its clients, and the faults that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.breaking.asking import Asking
from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.chaos.victims import MockVictims
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.mock.author import Author
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.mock.vocabulary import load_vocabulary
from kvrelay.deploy.model import model_path


class Bench:
    """A cluster, its clients and its faults."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.http = http
        self.clients = Asking(cluster, http)
        words = load_vocabulary(cluster.model)
        self.author = Author(words.words, words.end, cluster.config.mock.answer_tokens)
        """Knows what the engines must answer."""
        self.victims = MockVictims(http, f"http://127.0.0.1:{cluster.config.mock.control_port}", cluster.engine_key)

    def __repr__(self) -> str:
        return f"<Bench of {self.cluster!r}>"

    async def keep_asking(self, stop: asyncio.Event, counts: dict[str, int], prompt_tokens: int, tokens: int) -> None:
        """One client until ``stop``, all of whose answers are compared with the right ones."""
        await self.clients.keep_asking(stop, counts, prompt_tokens, tokens, self.author)

    async def suffer(self, *names: str, **faults: Any) -> None:
        for name in names:
            await self.victims.give(name, Faults(**faults))


@asynccontextmanager
async def clients() -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as there are requests; none is kept: an engine may close it as the next request leaves."""
    limit = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(total=120)) as http:
        yield http


@asynccontextmanager
async def bench(
    size: tuple[int, int],
    *,
    time_scale: float,
    store_tokens: int = 1 << 21,
    replicate_share: float = 0.0,
    step_tokens: int = 0,
) -> AsyncIterator[Bench]:
    """``size``: prefill and decode workers, with a store for each pool. ``step_tokens``: most of a step and of one
    prompt in it, whoever else is there; 0: the usual ones."""
    config = Config(
        worker=WorkerConfig(max_batched_tokens=step_tokens or 2048, shared_chunk_tokens=step_tokens or 512),
        mock=MockConfig(enabled=True, time_scale=time_scale, kv_tokens=1 << 17, store_tokens=store_tokens),
        router=RouterConfig(port=0, control_port=0, replicate_share=replicate_share),
        cluster=ClusterConfig(prefill=size[0], decode=size[1], stores=2),
    )
    async with LocalCluster(config, model=model_path()) as cluster, clients() as http:
        yield Bench(cluster, http)
