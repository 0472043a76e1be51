"""One life of a mock worker: its engine, its server, its feed. It ends without a goodbye when it is to die."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from kvrelay.deploy.mock.api import Api
from kvrelay.deploy.mock.asked import Body
from kvrelay.deploy.mock.engine import Engine, Took
from kvrelay.deploy.mock.faults import Condition, Faults, Params
from kvrelay.deploy.mock.handoff import Handoffs
from kvrelay.deploy.mock.kv_cache import KvCache
from kvrelay.deploy.mock.lossy_pages import LossyPages
from kvrelay.deploy.mock.page_store import MockStore
from kvrelay.deploy.mock.scheduler import Scheduler
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.deploy.mock.site import Site
from kvrelay.errors import Malformed
from kvrelay.feed import Feed
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.engine import DecodeLeg, Handoff, PrefillLeg, engine_key
from kvrelay.protocol.feed import Heartbeat, RegisterWorker, SetDrain
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends
from kvrelay.types import Drain, Medium, Role, WorkerInfo

SHUTDOWN_S = 0.1
"""Requests in flight get no longer when a worker ends: their router hears of it by the broken connection."""
_STRANGE = "a-request-of-yesterday/0/0"
"""What a worker that takes the orders of the request before takes for its first one."""


class Incarnation:
    """Serves until it is cancelled."""

    def __init__(self, site: Site, name: str, role: Role, store: MockStore, url: str, condition: Condition) -> None:
        self.info = WorkerInfo(
            name=name,
            incarnation=secrets.token_hex(4),
            role=role,
            url=url,
            model=site.model,
            store=store.info.name,
            engine=site.engine,
        )
        self._site = site
        self._store = store
        self._condition = condition
        self._drain = Drain()
        self._malformed = 0
        self._last_leg: Handoff | None = None
        self._handoffs = Handoffs(
            store,
            site.by_address,
            site.form,
            site.load_law,
            owner=self.info.incarnation,
            later=site.later,
            wake=lambda: self.engine.wake(),
        )
        self.log = log = PageLog(self.info.incarnation)
        cache = KvCache(
            site.engine.kv_tokens // site.engine.block_tokens,
            stored=lambda names: log.store(names, Medium.HBM),
            removed=lambda names: log.remove(names, Medium.HBM),
        )
        self.engine = Engine(Scheduler(cache, site.timing, site.limits, self._handoffs, site.author), site.now)
        self._feed = self._fed(LossyPages(log, condition))
        self._network = asyncio.Event()
        self.obey()

    def __repr__(self) -> str:
        return f"<Incarnation {self.info.incarnation} of {self.info.name}, {self.engine!r}>"

    @property
    def faults(self) -> Faults:
        return self._condition.faults

    def obey(self) -> None:
        """Take the faults of now on."""
        self.engine.slow, self.engine.least_s = self.faults.slow, self.faults.step_s
        self.engine.hang(self.faults.hang)
        self._feed.mute(self.faults.mute)
        (self._network.clear if self.faults.mute else self._network.set)()

    def _fed(self, pages: LossyPages) -> Feed:
        return Feed(
            self._site.routers,
            self._site.key,
            sender=self.info.name,
            registration=self._registration(),
            heartbeat=self._heartbeat,
            heartbeat_s=self._site.config.cluster.heartbeat_s,
            pages=pages,
            heard=self._hear,
        )

    def _registration(self) -> RegisterWorker:
        return RegisterWorker(worker=self.info, drain=self._drain)

    def _hear(self, message: Message) -> None:
        """As a worker does: the newest order of any router is told to all."""
        if isinstance(message, SetDrain) and message.drain.number > self._drain.number:
            self._drain = message.drain
            self._feed.register(self._registration())

    def _heartbeat(self) -> Heartbeat:
        counts = {
            "handoffs_malformed": self._malformed,
            "kv_blocks_used": self.engine.scheduler.cache.used_blocks,
        }
        return Heartbeat(
            name=self.info.name,
            incarnation=self.info.incarnation,
            healthy=True,
            counts=counts,
            progress=self.engine.progress(),
        )

    # ------------------------------------------------------------ what its server asks for

    def leg(self, body: Body) -> Handoff | None:
        """The router's orders as this worker reads them."""
        if self.faults.params is Params.GARBAGE:
            self._malformed += 1
            return None
        try:
            leg = body.leg()
        except Malformed:
            self._malformed += 1
            return None
        before, self._last_leg = self._last_leg, leg
        return _stale(leg, before) if self.faults.params is Params.STALE else leg

    async def reachable(self) -> None:
        await self._network.wait()

    def submit(self, sequence: Sequence, took: Took) -> None:
        self._handoffs.arrived(sequence, self._site.now())
        self.engine.submit(sequence, took)

    # ------------------------------------------------------------ life and death

    async def run(self, sock: socket.socket, born: Callable[[], None]) -> None:
        """Serve at ``sock``; ``born`` is called when it does. Says goodbye when it is cancelled, unless it died."""
        api = Api(
            self,
            self._site.intake,
            self._site.vocabulary,
            model=self._site.model,
            engine_key=engine_key(self._site.key),
        )
        async with _serving(api.app(), sock):
            born()
            await until_one_ends(self._feed.run(), self.engine.run())

    def die(self) -> None:
        """Whatever comes now is not said goodbye to; what the node's store still expected will not come."""
        self._feed.silence()
        for store in self._site.stores:
            store.fail_all(self.info.incarnation, f"{self.info.name}/{self.info.incarnation} is gone")


def _stale(leg: Handoff | None, before: Handoff | None) -> Handoff | None:
    """The orders of the request before, in place of ``leg``."""
    if isinstance(leg, PrefillLeg):
        return before if isinstance(before, PrefillLeg) else PrefillLeg(transfer=_STRANGE, push_to=leg.push_to)
    if isinstance(leg, DecodeLeg):
        return before if isinstance(before, DecodeLeg) else DecodeLeg(transfers=[_STRANGE])
    return None


@contextlib.asynccontextmanager
async def _serving(app: web.Application, sock: socket.socket) -> AsyncIterator[None]:
    """``app`` at ``sock``; at the end connections are reset, as the kernel does for a process that is gone."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=1024).start()
        yield
    finally:
        for connection in runner.server.connections if runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
