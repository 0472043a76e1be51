"""One worker: a supervised vLLM engine that the routers know of.

It registers only an engine that serves, says in every heartbeat whether it still does, and never outlives it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvrelay.channel import is_everywhere
from kvrelay.config import Config, ConnectorConfig
from kvrelay.connector.ticks import read_ticks, ticks_path
from kvrelay.deploy import cores
from kvrelay.deploy.engine import EngineSpec, engine_spec
from kvrelay.deploy.engine_pages import EnginePages
from kvrelay.deploy.event_relay import EventRelay
from kvrelay.deploy.key import read_key
from kvrelay.deploy.ports import free_port, require_free
from kvrelay.deploy.scratch import scratch
from kvrelay.deploy.server import EngineServer, Sink, engine_server, socket_parent
from kvrelay.deploy.weights import weights_digest
from kvrelay.errors import Lost, Misconfigured
from kvrelay.feed import Feed
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.engine import engine_key
from kvrelay.protocol.feed import Heartbeat, RegisterWorker, SetDrain
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends
from kvrelay.types import Drain, Engine, Role, Value, WorkerInfo

HEARTBEATS_PER_LOOK = 2
"""Each look at the engine's health costs it and its supervisor a request; a dead engine is noticed without."""
_ENGINE_FILE_WAIT_S = 5.0
_POLL_S = 0.05


class WorkerPlan(Value, frozen=True, kw_only=True):
    """Which worker to run, and where its neighbours are."""

    name: str
    role: Role
    model_path: Path
    routers: tuple[str, ...]
    """``host:port`` of the routers' control ports."""
    store: str
    """Name of this node's store."""
    store_socket: Path
    key_file: Path
    port: int = 0
    """Port of the engine's OpenAI server; 0 takes a free one."""


class Worker:
    """The worker's side of its registration: who it is, and whether its engine answers."""

    def __init__(self, info: WorkerInfo, engine: EngineServer, engine_file: Path, events: Path) -> None:
        self.info = info
        self._engine = engine
        self._engine_file = engine_file
        self.healthy = True
        self.drain = Drain()
        """What routers told last: whoever forgets it is told again from here."""
        self.pages = PageLog(info.incarnation)
        self.relay = EventRelay(events, EnginePages(self.pages, self.engine_now))

    def __repr__(self) -> str:
        state = "healthy" if self.healthy else "not healthy"
        return f"<Worker {self.info.name}, {self.info.role}, {state}, {self.info.url}>"

    def registration(self) -> RegisterWorker:
        return RegisterWorker(worker=self.info, drain=self.drain)

    def hear(self, message: Message, tell: Callable[[RegisterWorker], None]) -> None:
        """A router says something; ``tell`` all of them what is new of it."""
        if isinstance(message, SetDrain) and message.drain.number > self.drain.number:
            self.drain = message.drain
            tell(self.registration())

    def heartbeat(self) -> Heartbeat:
        us = self.info
        return Heartbeat(
            name=us.name,
            incarnation=us.incarnation,
            healthy=self.healthy,
            counts=self.relay.counts() | {"log_lines_lost": self._engine.log_lines_lost},
            progress=read_ticks(ticks_path(self._engine_file)),
        )

    async def watch(self, every_s: float, tell: Callable[[RegisterWorker], None]) -> None:
        """Ask the engine for its health for ever; ``tell`` the routers when it became another, with new weights."""
        while True:
            self.healthy = await self._engine.is_healthy()
            engine = self.engine_now()
            if engine != self.info.engine:
                self.info = msgspec.structs.replace(self.info, engine=engine)
                tell(self.registration())
            await asyncio.sleep(every_s)

    def engine_now(self) -> Engine:
        """A file that somebody cleaned away says nothing new: the engine serves all the same."""
        try:
            return read_engine(self._engine_file)
        except FileNotFoundError:
            return self.info.engine


async def run_worker(
    config: Config,
    plan: WorkerPlan,
    *,
    ready: Callable[[WorkerInfo], None] | None = None,
    sink: Sink | None = None,
) -> None:
    """Run the worker of ``plan`` until cancelled. ``sink`` takes the engine's log (stdout when None).

    Raises ``Misconfigured`` before anything starts, ``Lost`` when the engine dies.
    """
    key = read_key(plan.key_file)
    require_free(config.worker.host, plan.port, "--port")
    incarnation = secrets.token_hex(4)
    with scratch("worker-") as folder, scratch("events-", socket_parent()) as events:
        engine_file = folder / "engine.json"
        spec = msgspec.structs.replace(worker_engine(config, plan, incarnation, engine_file), events=events)
        async with engine_server(spec, sink, api_key=engine_key(key)) as engine:
            await engine.wait_serving(config.worker.start_wait_s)
            info = await _introduce(config, plan, incarnation, spec, engine_file)
            worker = Worker(info, engine, engine_file, events)
            feed = _feed(worker, plan.routers, key, config.cluster.heartbeat_s)
            if ready is not None:
                ready(info)
            # The feed says goodbye when it is cancelled, before the engine ends.
            await until_one_ends(
                feed.run(),
                worker.watch(HEARTBEATS_PER_LOOK * config.cluster.heartbeat_s, feed.register),
                worker.relay.run(),
                engine.wait_death(),
            )


def worker_engine(config: Config, plan: WorkerPlan, incarnation: str, engine_file: Path) -> EngineSpec:
    """The engine of ``plan``: pinned, with the connector that talks to this node's store. Raises ``Misconfigured``."""
    host = config.worker.host
    if is_everywhere(host) and not config.worker.advertise:
        raise Misconfigured("worker.host means every address: set worker.advertise to the one that routers can reach")
    pinned = cores.parse(config.worker.cpus) if config.worker.cpus else cores.available()
    spec = engine_spec(config, plan.model_path, port=plan.port or free_port(host), cpus=pinned)
    connector = ConnectorConfig(
        worker=plan.name,
        incarnation=incarnation,
        store_socket=str(plan.store_socket),
        key_file=str(plan.key_file),
        engine_file=str(engine_file),
        weights=weights_digest(plan.model_path),
        page_tokens=config.worker.page_tokens,
        load_wait_s=config.worker.load_wait_s,
        lossy=config.store.lossy,
    )
    return msgspec.structs.replace(spec, connector=connector, host=host)


async def _introduce(
    config: Config, plan: WorkerPlan, incarnation: str, spec: EngineSpec, engine_file: Path
) -> WorkerInfo:
    advertised = config.worker.advertise
    return WorkerInfo(
        name=plan.name,
        incarnation=incarnation,
        role=plan.role,
        url=f"http://{advertised}" if advertised else spec.url,
        model=spec.served_name,
        store=plan.store,
        engine=await _await_engine(engine_file),
    )


async def _await_engine(path: Path) -> Engine:
    """What the connector wrote about its engine. Raises ``Lost`` when it wrote nothing."""
    try:
        async with asyncio.timeout(_ENGINE_FILE_WAIT_S):
            while not path.exists():
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise Lost("the engine serves but its connector wrote nothing about it; see the engine's log") from error
    return read_engine(path)


def read_engine(path: Path) -> Engine:
    """What an engine is now: its connector writes the file anew when the engine's weights change."""
    return msgspec.json.decode(path.read_bytes(), type=Engine)


def _feed(worker: Worker, routers: tuple[str, ...], key: bytes, heartbeat_s: float) -> Feed:
    feed = Feed(
        routers,
        key,
        sender=worker.info.name,
        registration=worker.registration(),
        heartbeat=worker.heartbeat,
        heartbeat_s=heartbeat_s,
        pages=worker.pages,
        heard=lambda message: worker.hear(message, feed.register),
    )
    return feed
