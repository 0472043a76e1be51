"""A mock cluster as processes of its own, and one client's view of a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from benchmarks.prompts import Prompts
from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.chaos.victims import MockVictims
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.model import model_path


@dataclass
class Stream:
    """What one client saw, and when."""

    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    done: bool = False
    error: bool = False
    timeline: dict[str, Any] = field(default_factory=dict)

    @property
    def longest_pause_s(self) -> float:
        """Between two tokens."""
        return max((after - before for before, after in zip(self.came_s, self.came_s[1:], strict=False)), default=0.0)


class Bench:
    """A cluster, its clients and its faults."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.http = http
        self.model = cluster.model.name
        self.victims = MockVictims(http, f"http://127.0.0.1:{cluster.config.mock.control_port}", cluster.engine_key)
        self._prompts = Prompts(7)
        # Half a character at a prompt's end would begin the answer's text: mock workers know nothing of that.
        self._end: list[int] = Tokenizer.from_file(str(cluster.model / "tokenizer.json")).encode(" and so").ids

    def __repr__(self) -> str:
        return f"<Bench of {self.cluster!r}>"

    def prompt(self, tokens: int) -> list[int]:
        return self._prompts.of(tokens - len(self._end)) + self._end

    async def suffer(self, *names: str, **faults: Any) -> None:
        for name in names:
            await self.victims.give(name, Faults(**faults))

    async def stream(self, prompt: list[int], count: int, stream: Stream | None = None) -> Stream:
        """Ask for ``count`` tokens; ``stream`` is filled as they come."""
        stream = stream or Stream()
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
        url = f"{self.cluster.url}/v1/completions"
        async with self.http.post(url, json=body | {"return_token_ids": True}) as response:
            response.raise_for_status()
            async for line in response.content:
                self._take(line.removeprefix(b"data: ").strip(), stream)
        async with self.http.get(f"{self.cluster.url}/kvrelay/requests/{response.headers['x-request-id']}") as told:
            stream.timeline = await told.json() if told.status == 200 else {}
        return stream

    def _take(self, data: bytes, stream: Stream) -> None:
        if data == b"[DONE]":
            stream.done = True
        elif data:
            event = msgspec.json.decode(data)
            stream.error = stream.error or "error" in event
            ids = [id for choice in event.get("choices", []) for id in choice.get("token_ids") or []]
            stream.tokens += ids
            stream.came_s += [time.monotonic()] * len(ids)

    async def metric(self, line: str) -> float:
        """Sum of the metric lines that begin so."""
        async with self.http.get(f"{self.cluster.url}/metrics") as response:
            rows = (await response.text()).splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(line))

    async def until(self, metric: str, least: float, within_s: float = 60.0) -> float:
        """Wait until a metric is at least so; how long that took."""
        began = time.monotonic()
        while await self.metric(metric) < least:
            if time.monotonic() - began > within_s:
                raise TimeoutError(f"{metric} stays under {least}")
            await asyncio.sleep(0.01)
        return time.monotonic() - began


@asynccontextmanager
async def bench(size: tuple[int, int], *, time_scale: float, store_tokens: int = 1 << 21) -> AsyncIterator[Bench]:
    """``size``: prefill and decode workers, with a store for each pool."""
    config = Config(
        worker=WorkerConfig(max_batched_tokens=2048, shared_chunk_tokens=512),
        mock=MockConfig(enabled=True, time_scale=time_scale, kv_tokens=1 << 17, store_tokens=store_tokens),
        router=RouterConfig(port=0, control_port=0),
        cluster=ClusterConfig(prefill=size[0], decode=size[1], stores=2),
    )
    async with LocalCluster(config, model=model_path()) as cluster:
        limit = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(total=120)) as http:
            yield Bench(cluster, http)
