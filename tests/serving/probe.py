"""Asks engines, stores and the router what they hold, and checks that nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.breaking.stopped import processes
from kvrelay import identity
from kvrelay.cli.draining import Routers
from kvrelay.deploy.local import LocalCluster, WorkerView
from kvrelay.store.client import StoreClient
from kvrelay.types import Engine, PageName, Role
from tests.patience import PATIENCE_S

BACK_S = 2 * PATIENCE_S
"""Longest wait for a member that is whole again."""
QUIET_S = 30.0
"""Longest wait for everything to come to rest: the longest lease, and a step."""


async def read_metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Samples of ``url``/metrics by name, those of one name and different labels by ``name{label=value}`` too."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
            for label, value in sample.labels.items():
                key = f"{sample.name}{{{label}={value}}}"
                values[key] = values.get(key, 0.0) + sample.value
    return values


async def prompt_tokens(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Where the prompt tokens of the engine at ``url`` came from: computed, its own cache, or outside."""
    values = await read_metrics(http, url)
    name = "vllm:prompt_tokens_by_source_total{source="
    return {key.removeprefix(name).rstrip("}"): value for key, value in values.items() if key.startswith(name)}


class Probe:
    """One running cluster seen from outside."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.http = http

    def worker(self, role: Role) -> WorkerView:
        return next(worker for worker in self.cluster.workers if worker.role is role)

    @property
    def prefillers(self) -> list[WorkerView]:
        return [worker for worker in self.cluster.workers if worker.role is Role.PREFILL]

    @property
    def decoders(self) -> list[WorkerView]:
        return [worker for worker in self.cluster.workers if worker.role is Role.DECODE]

    @property
    def engine_headers(self) -> dict[str, str]:
        """What an engine wants to see of those who ask it directly."""
        return {"authorization": f"Bearer {self.cluster.engine_key}"}

    @functools.cached_property
    def engine(self) -> Engine:
        """What the engines say of themselves; all of one cluster have one fingerprint."""
        files = sorted(self.cluster.run.scratch.glob("worker-*/engine.json"))
        return msgspec.json.decode(files[0].read_bytes(), type=Engine)

    async def until_ready(self, name: str) -> None:
        """Return once the router gives ``name`` work again."""
        async with asyncio.timeout(BACK_S):
            while not await self._is_ready(name):
                await asyncio.sleep(0.1)

    async def _is_ready(self, name: str) -> bool:
        async with self.http.get(f"{self.cluster.url}/health") as response:
            workers = (await response.json())["workers"]
        return any(worker["name"] == name and worker["ready"] for worker in workers)

    @contextlib.asynccontextmanager
    async def without(self, *names: str) -> AsyncIterator[None]:
        """Inside the block these get no new work."""
        async with contextlib.AsyncExitStack() as stack:
            for name in names:
                routers = await stack.enter_async_context(Routers(self.cluster.controls, self.cluster.key))
                await routers.drain(name)
                stack.push_async_callback(routers.drain, name, undo=True)
            yield

    def processes_but(self, *names: str) -> dict[str, set[int]]:
        """Ids of the processes of all members but these: the same when nobody else died."""
        return processes(self.cluster, but=names)

    async def metrics(self, url: str) -> dict[str, float]:
        return await read_metrics(self.http, url)

    async def report(self, request_id: str) -> dict[str, Any]:
        """What the router tells of a request."""
        async with self.http.get(f"{self.cluster.url}/kvrelay/requests/{request_id}") as response:
            told: dict[str, Any] = await response.json()
            return told

    async def prompt_tokens(self, role: Role) -> dict[str, float]:
        return await prompt_tokens(self.http, self.worker(role).url)

    @contextlib.contextmanager
    def store(self, name: str) -> Iterator[StoreClient]:
        """A client of the store ``name``, as a script would have it."""
        client = StoreClient(
            self.cluster.stores[name],
            self.cluster.key,
            owner="test/1",
            format=self.engine.fingerprint.format,
        )
        client.start()
        try:
            assert client.wait_attached(10), client
            yield client
        finally:
            client.close()

    def counts(self) -> dict[str, int]:
        """The counters of all stores, added up."""
        total: dict[str, int] = {}
        for name in self.cluster.stores:
            with self.store(name) as client:
                for key, value in client.describe().items():
                    total[key] = total.get(key, 0) + value
        return total

    async def wait_for_pages(self, store: str, names: list[PageName]) -> None:
        """Return once the store holds all of them."""
        with self.store(store) as client:
            for _attempt in range(50):
                if all(client.exists(names)):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"{store} lacks pages: {client.exists(names)}")

    def page_names(self, tokens: list[int]) -> list[PageName]:
        fingerprint = self.engine.fingerprint
        return identity.name_pages(identity.root_name(fingerprint), tokens, fingerprint.format.page_tokens)

    async def leftovers(self) -> dict[str, Any]:
        """What is still held or waiting anywhere; empty at rest."""
        found: dict[str, Any] = {}
        for worker in self.cluster.workers:
            values = await self.metrics(worker.url)
            for key in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                found[f"{worker.name} {key}"] = values[key]
        for key, value in self.counts().items():
            if key in ("pages_pinned", "pages_filling", "slots_failed", "leases_open", "transfers_open"):
                found[f"store {key}"] = value
        counts = self.counts()
        # What is not an evictable page and not granted ahead is lost to everybody.
        lost = counts["slots_occupied"] - counts["pages_used"] - counts["slots_granted"]
        found["store slots lost"] = lost
        gauges = await self.metrics(self.cluster.url)
        for name, gauge in gauges.items():
            if "{" not in name and "in_flight" in name:
                found[f"router {name}"] = gauge
        return {key: value for key, value in found.items() if value}

    async def assert_at_rest(self) -> None:
        """The invariant: after quiescence nothing is held, pinned, counted or waiting anywhere."""
        deadline = time.monotonic() + QUIET_S
        while left := await self.leftovers():
            assert time.monotonic() < deadline, f"still held after {QUIET_S} s: {left}"
            await asyncio.sleep(0.2)
