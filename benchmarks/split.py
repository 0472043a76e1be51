"""What a benchmark asks of any split service, and kvrelay as one: a local cluster, asked through its router."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from benchmarks.answers import MODEL, Answer, completion, stream
from benchmarks.machine import fast_dtype
from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import fetch
from kvrelay.types import Role, Transport, Value

_TIMEOUT = aiohttp.ClientTimeout(total=None)


class Handed(Value, frozen=True, kw_only=True):
    """One request that went over both pools."""

    answer: Answer
    prefill_s: float | None
    """From the prefill's start, as near as it can be seen from outside, to P's response; None: nothing was split."""
    gap_s: float | None
    """From P's HTTP response to D's first token; None: nothing was split."""


class Split(Protocol):
    """A prefill and a decode worker, each on a core of its own."""

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Handed:
        """Send one request over both pools."""
        ...

    async def decode_only(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Ask D alone."""
        ...


def config(*, stores: int = 1, **worker: int) -> Config:
    """SmolLM2, one P and one D; ``worker`` overrides keys of ``WorkerConfig``.

    Two stores stand for two nodes: shared memory, the fastest way between them here, would be no link at all.
    """
    base = WorkerConfig(kv_cache_bytes=1 << 30)
    return Config(
        model=ModelConfig(name=MODEL, dtype=fast_dtype()),
        router=RouterConfig(port=0, control_port=0, local_prefill="never"),
        store=StoreConfig(arena_bytes=2 << 30, transports=(Transport.TCP,)),
        worker=msgspec.structs.replace(base, **worker),
        cluster=ClusterConfig(prefill=1, decode=1, stores=stores),
    )


class Kvrelay:
    """A running cluster of ours."""

    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession, direct: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self._http = http
        self._direct = direct

    def __repr__(self) -> str:
        return f"<Kvrelay {self.cluster!r}>"

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Handed:
        answer = await stream(self._http, self.cluster.url, completion(prompt, max_tokens))
        events = (await self.report(answer))["events"]
        if "prefill_finished" not in events:
            return Handed(answer=answer, prefill_s=None, gap_s=None)
        return Handed(
            answer=answer,
            prefill_s=events["prefill_finished"] - events["prefill_started"],
            gap_s=events["first_token"] - events["prefill_finished"],
        )

    async def report(self, answer: Answer) -> dict[str, Any]:
        """What the router keeps of a request; its events in seconds since it came in."""
        async with self._http.get(f"{self.cluster.url}/kvrelay/requests/{answer.request_id}") as response:
            report: dict[str, Any] = await response.json()
            return report

    async def decode_only(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        return await self.direct(Role.DECODE, prompt, max_tokens)

    async def direct(self, role: Role, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Ask one engine past the router: nothing of it is handed over."""
        worker = next(worker for worker in self.cluster.workers if worker.role is role)
        return await stream(self._direct, worker.url, completion(prompt, max_tokens))


@contextlib.asynccontextmanager
async def kvrelay(wanted: Config) -> AsyncIterator[Kvrelay]:
    """A cluster of ``wanted``, serving."""
    async with LocalCluster(wanted, model=fetch()) as cluster:
        headers = {"Authorization": f"Bearer {cluster.engine_key}"}
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as http,
            aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as direct,
        ):
            yield Kvrelay(cluster, http, direct)
