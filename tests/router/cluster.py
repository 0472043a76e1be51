"""A router with fake workers and fake stores around it, all on real sockets in this process."""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from msgspec.structs import replace

from kvrelay import channel
from kvrelay.channel import Channel, bind_tcp
from kvrelay.config import ClusterConfig, Config, RouterConfig
from kvrelay.protocol.engine import PrefillLeg
from kvrelay.protocol.feed import Heartbeat, Leaving, RegisterStore, RegisterWorker, TransferEvent
from kvrelay.protocol.message import Message
from kvrelay.router.defaults import Defaults
from kvrelay.router.runner import Router
from kvrelay.router.tokens import Tokens, load_tokens
from kvrelay.types import Role, Stage, StoreInfo, WorkerInfo
from tests.fleet.values import store, worker
from tests.patience import until
from tests.router.fake_vllm import FakeVllm

KEY = b"k" * 32


class Member:
    """A worker's or a store's link to the router."""

    def __init__(self, link: Channel, info: WorkerInfo | StoreInfo) -> None:
        self.link = link
        self.info = info
        self.silent = False
        self.progress: int | None = None
        """Of its heartbeats."""
        self.works = False
        """Each heartbeat shows progress."""

    async def beat(self) -> None:
        while True:
            if not self.silent:
                await self.send(self.heartbeat())
            await asyncio.sleep(0.1)

    def heartbeat(self, healthy: bool = True) -> Heartbeat:
        if self.works:
            self.progress = (self.progress or 0) + 1
        return Heartbeat(
            name=self.info.name,
            incarnation=self.info.incarnation,
            healthy=healthy,
            counts={"pages_used": 3},
            progress=self.progress,
        )

    async def send(self, message: Message) -> None:
        await self.link.send(message)

    async def leave(self) -> None:
        self.silent = True
        await self.send(Leaving(name=self.info.name, incarnation=self.info.incarnation))

    async def event(self, transfer: str, stage: Stage, **more: Any) -> None:
        await self.send(TransferEvent(store=self.info.name, transfer=transfer, stage=stage, **more))


@dataclass
class Cluster:
    """Use as an async context manager."""

    folder: Path
    router_config: RouterConfig = field(default_factory=lambda: RouterConfig(port=0, control_port=0))
    dead_after_s: float = 1.0
    workers: dict[str, FakeVllm] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    url: str = ""
    control: str = ""
    defaults: Defaults | None = None

    async def __aenter__(self) -> Cluster:
        self._stack = await AsyncExitStack().__aenter__()
        self.tokens: Tokens = _loaded(self.folder)
        config = Config(router=self.router_config, cluster=ClusterConfig(dead_after_s=self.dead_after_s))
        self.router = Router(config, KEY, self.tokens, self.defaults)
        ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        api, control = (
            bind_tcp("127.0.0.1", 0),
            bind_tcp(self.router_config.control_host, self.router_config.control_port),
        )
        serving = self.router.serve(api, control, lambda url, address: ready.set_result((url, address)))
        await self._background(serving)
        self.url, self.control = await ready
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(self.url))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(end)

    async def dial(self, info: WorkerInfo | StoreInfo) -> Member:
        """Register ``info``, once."""
        registration = RegisterWorker(worker=info) if isinstance(info, WorkerInfo) else RegisterStore(store=info)
        member = Member(await channel.connect(self.control, KEY, sender=info.name, purpose="feed"), info)
        self._stack.callback(member.link.close)
        await member.send(registration)
        return member

    async def join(self, info: WorkerInfo | StoreInfo) -> Member:
        """Register ``info`` and keep its lease."""
        member = await self.dial(info)
        await self._background(member.beat())
        self.members[info.name] = member
        return member

    async def add(
        self,
        name: str,
        role: Role,
        *,
        store_name: str = "s1",
        weights: str = "w1",
        model: str = "tiny",
        dtype: str = "bfloat16",
        checked: bool = True,
        fake: FakeVllm | None = None,
        replays: bool = False,
        max_model_len: int = 512,
        **more: Any,
    ) -> FakeVllm:
        """Start a fake worker and register it; once it is ready (and its rendering ``checked``), return."""
        made = FakeVllm(tokens=self.tokens, model=model, **more) if fake is None else fake
        fake = await self._stack.enter_async_context(made.serve())
        self.workers[name] = fake
        info = worker(name, role, url=fake.url, store=store_name, weights=weights, model=model, dtype=dtype)
        await self.join(replace(info, engine=replace(info.engine, replays=replays, max_model_len=max_model_len)))
        await until(lambda: self.is_ready(name))
        if checked:
            probes = 5 if fake.renders and not fake.render_shift else 2
            await until(lambda: len(fake.calls) >= probes)
        return fake

    def drains(self, name: str) -> bool:
        """Whether its router knows that ``name`` is to become empty."""
        member = self.router.brain.fleet.workers.get(name)
        return member is not None and member.draining

    def is_ready(self, name: str) -> bool:
        return self.router.brain.fleet.workers.is_usable(name, time.monotonic())

    async def split(self, **more: Any) -> tuple[FakeVllm, FakeVllm]:
        """One P and one D on one store."""
        await self.join(store())
        return await self.add("p1", Role.PREFILL, **more), await self.add("d1", Role.DECODE)

    def says(self, *stages: Stage, store_name: str = "s1") -> Any:
        """A hook for a fake P: its store reports ``stages`` as soon as P is asked."""

        async def report(leg: PrefillLeg) -> None:
            for stage in stages:
                await self.members[store_name].event(leg.transfer, stage)

        return report

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, JSON and headers of one request."""
        async with self.http.post(path, json=body, **more) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), headers

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer, _ = await self.post("/v1/completions", {"model": "tiny", "prompt": "Hello, you", **body})
        assert status == 200, answer
        return answer

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[bytes]:
        """The events of a streamed answer."""
        asked = {"model": "tiny", "prompt": "Hello, you", "stream": True, **body}
        async with self.http.post(path, json=asked) as response:
            assert response.status == 200, await response.text()
            return [event for event in (await response.read()).split(b"\n\n") if event]

    async def metric(self, line: str) -> float:
        """Value of the metric line that starts with ``line``; 0 when it is not there."""
        async with self.http.get("/metrics") as response:
            text = await response.text()
        return sum(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line))

    async def at_rest(self) -> None:
        """Nothing is in flight and nothing is reserved anywhere."""
        brain = self.router.brain
        await until(lambda: brain.in_flight == 0)
        await until(lambda: all(fake.in_flight == 0 for fake in self.workers.values()))
        brain.check_invariants()
        assert repr(brain.loads) == "<Loads 0 prefill legs, 0 sequences>"


@functools.cache
def _loaded(folder: Path) -> Tokens:
    """The same tokenizer for all routers of a test run: it keeps no state between requests."""
    return load_tokens(folder)
