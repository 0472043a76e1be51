"""Starts the router and keeps it running. A background task that dies ends the router: it must never serve on
without its heartbeats or its clock."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from kvrelay.channel import Listener, bind_tcp, reachable
from kvrelay.config import Config
from kvrelay.errors import Misconfigured
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.fleet.health import examine
from kvrelay.protocol.engine import engine_key
from kvrelay.router.clients import Clients
from kvrelay.router.connection import Connection, Refusals
from kvrelay.router.defaults import Defaults, read_defaults
from kvrelay.router.desk import Desk
from kvrelay.router.extent import limit_integers
from kvrelay.router.feed import FeedServer
from kvrelay.router.gateway import Gateway
from kvrelay.router.keys import Keyring
from kvrelay.router.learned import LearnedFile
from kvrelay.router.operator import OperatorServer
from kvrelay.router.promises import Promises, limits
from kvrelay.router.prompts import PromptReader
from kvrelay.router.readings import BrainReadings
from kvrelay.router.render import Renderer
from kvrelay.router.shortage import Shortage
from kvrelay.router.switchboard import Switchboard
from kvrelay.router.telemetry import Telemetry
from kvrelay.router.tokens import Tokens, load_tokens
from kvrelay.router.upstream import Upstream
from kvrelay.types import WorkerInfo

TICK_S = 0.2
LATE_S = 0.2
"""A tick that is later than this follows a stall of this process: what members said meanwhile is still to be read."""
MEET_S = 3.0
"""Members dial again within a second; a million pages are told in two."""
MEET_POLL_S = 0.05
SHUTDOWN_S = 1.0
"""Longest wait for requests in flight when the router ends."""


async def run_router(
    config: Config,
    *,
    key: bytes,
    model_path: Path,
    ready: Callable[[str, str], None] | None = None,
    drain: DrainCommand | None = None,
) -> None:
    """Serve until cancelled; ``ready(api_url, control_address)`` when both ports answer. ``drain``: how this machine's
    operators call that command, but for this router's address. Raises ``Misconfigured``."""
    limit_integers()
    with contextlib.ExitStack() as stack:
        shared = config.router.replicas > 1
        api = stack.enter_context(_bind(config.router.host, config.router.port, "router.port", shared=shared))
        control = stack.enter_context(
            _bind(config.router.control_host, config.router.control_port, "router.control_port")
        )
        tokens = await asyncio.to_thread(load_tokens, model_path)
        stack.callback(tokens.close)
        defaults = read_defaults(model_path)
        await Router(config, key, tokens, defaults, drain).serve(api, control, ready)


class Router:
    """The parts of one router, put together. Raises ``Misconfigured``."""

    def __init__(
        self,
        config: Config,
        key: bytes,
        tokens: Tokens,
        defaults: Defaults | None = None,
        drain: DrainCommand | None = None,
    ) -> None:
        self._config = config.router
        self._drain = drain or DrainCommand()
        self._keyring = Keyring(config.router.api_keys, key)
        self._promises = Promises(config, self._keyring.tenants)
        self._key = key
        self._tokens = tokens
        self._defaults = defaults
        self._clock = time.monotonic
        self.brain = Brain(
            dead_after_s=config.cluster.dead_after_s,
            transfer_wait_s=config.router.transfer_wait_s,
            convert_kv_dtype=config.router.convert_kv_dtype,
            local_prefill=config.router.local_prefill == "auto",
            index_pages=config.router.index_pages,
            limits=limits(config.router, self._keyring.tenants),
            replicate_share=config.router.replicate_share,
            knows_all=config.router.replicas == 1,
        )
        path = config.router.learned_file
        self._learned = LearnedFile(Path(path), self.brain.experience) if path else None
        if self._learned is not None:
            self._learned.load()
        self._switchboard = Switchboard()
        self.shortage = Shortage(self._clock)
        self.clients = Clients(self._clock, self.shortage)
        self._readings = BrainReadings(self.brain, self._clock, self.clients, self.shortage)
        self._telemetry = Telemetry(self._readings)

    def __repr__(self) -> str:
        return f"<Router {self.brain!r}>"

    async def serve(self, api: socket.socket, control: socket.socket, ready: Callable[[str, str], None] | None) -> None:
        """Serve both sockets until cancelled."""
        self._drain = msgspec.structs.replace(self._drain, router=_address(control))
        upstream = Upstream(
            connect_s=self._config.upstream_connect_s, engine_key=engine_key(self._key), shortage=self.shortage
        )
        renderer = Renderer(upstream, self._tokens)
        desk = Desk(
            self.brain,
            upstream,
            self._telemetry,
            self._clock,
            self._switchboard,
            self._tokens,
            resumes=self._config.resume,
            defaults=self._defaults,
        )
        self._readings.desk = desk
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(upstream.close)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._listen(control, desk, renderer, tasks))
            tasks.create_task(self._tick(desk))
            if self._learned is not None:
                tasks.create_task(self._learned.run())
            if self._config.replicas > 1:
                await self._meet_fleet()
            await stack.enter_async_context(_site(self._gateway(desk, renderer).app(), api, self.clients))
            if ready is not None:
                ready(f"http://{_address(api)}", _address(control))
            await asyncio.Event().wait()

    async def _meet_fleet(self) -> None:
        """A router that shares its port takes no connection as long as it would have to refuse what another one serves:
        until members have dialled, and told of their pages."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEET_S):
                while not self._knows_fleet():
                    await asyncio.sleep(MEET_POLL_S)

    def _knows_fleet(self) -> bool:
        streams = self.brain.index.streams().values()
        return examine(self.brain, self._clock()).serving and all(stream.is_whole for stream in streams)

    def _gateway(self, desk: Desk, renderer: Renderer) -> Gateway:
        return Gateway(
            self.brain,
            desk,
            PromptReader(self._tokens, renderer, kv_routing=self._config.kv_routing),
            self._keyring,
            self._promises,
            self._telemetry,
            self._clock,
            self.shortage,
            max_body_bytes=self._config.max_body_bytes,
            drain=self._drain,
        )

    async def _listen(self, sock: socket.socket, desk: Desk, renderer: Renderer, tasks: asyncio.TaskGroup) -> None:
        def heard(worker: WorkerInfo) -> None:
            if renderer.wants(worker):
                tasks.create_task(renderer.check(worker))

        feed = FeedServer(self.brain, self._clock, desk.obey, heard, self._switchboard)
        operators = OperatorServer(
            self.brain, self._clock, desk.obey, replicas=self._config.replicas, drain=self._drain
        )
        serve = {"feed": feed.serve, "operator": operators.serve}
        listener = Listener(
            sock, self._key, receiver="router", purposes=serve, serve=lambda link: serve[link.purpose](link)
        )
        self._readings.listener = listener
        await listener.run()

    async def _tick(self, desk: Desk) -> None:
        while True:
            desk.tick()
            self.clients.tick()
            due_s = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            if self._clock() > due_s + LATE_S:  # else whoever was not listened to would count as silent
                await asyncio.sleep(TICK_S)


def _bind(host: str, port: int, setting: str, *, shared: bool = False) -> socket.socket:
    try:
        return bind_tcp(host, port, shared=shared)
    except OSError as error:
        raise Misconfigured(f"cannot listen on {host}:{port} ({error.strerror}); free it or set {setting}") from error


@contextlib.asynccontextmanager
async def _site(app: web.Application, sock: socket.socket, clients: Clients) -> AsyncIterator[None]:
    """``app`` served on ``sock``; a client that hangs up cancels its handler."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        listening = await _listening(runner.server, sock, clients)
        try:
            yield
        finally:
            listening.close()
    finally:
        await runner.cleanup()


async def _listening(server: web.Server | None, sock: socket.socket, clients: Clients) -> asyncio.Server:
    """A site of aiohttp's would make connections of its own class."""
    assert server is not None, "the runner is set up"
    loop = asyncio.get_running_loop()
    refusals = Refusals(loop.time)
    return await loop.create_server(lambda: Connection(server, loop, refusals, clients), sock=sock, backlog=1024)


def _address(sock: socket.socket) -> str:
    """``host:port`` at which this machine reaches ``sock``."""
    host, port = sock.getsockname()[:2]
    return f"{reachable(host)}:{port}"
