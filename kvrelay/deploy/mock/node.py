"""All mock workers and stores of one process. It must never serve on when one died by mistake."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from kvrelay.channel import bind_tcp
from kvrelay.config import Config
from kvrelay.deploy.mock.control import HOST, Control
from kvrelay.deploy.mock.roster import WorkerPlan
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.mock.worker import MockWorker
from kvrelay.errors import Misconfigured
from kvrelay.protocol.engine import engine_key
from kvrelay.race import until_one_ends
from kvrelay.router.tokens import load_tokens
from kvrelay.types import Value


class NodePlan(Value, frozen=True, kw_only=True):
    """What one process pretends to be."""

    model_path: Path
    """Its tokenizer and config.json are read, weights are not."""
    routers: tuple[str, ...]
    workers: tuple[WorkerPlan, ...]
    stores: tuple[str, ...]


class MockNode:
    """The mock workers and stores of one process; ``run_node`` starts one."""

    def __init__(self, site: Site, plans: tuple[WorkerPlan, ...]) -> None:
        """Raises ``Misconfigured`` when a port is taken."""
        self.site = site
        self._socket = _bound(site.config.mock.control_port)  # before a worker could choose that port
        self.workers = {plan.name: MockWorker(plan, site) for plan in plans}
        self.control_url = ""

    def __repr__(self) -> str:
        return f"<MockNode {len(self.workers)} workers, {self.site!r}>"

    async def run(self, ready: Callable[[MockNode], None]) -> None:
        """Until cancelled; ``ready`` once all workers that are not to be dead serve. Raises ``Misconfigured``."""
        unborn = {name for name, worker in self.workers.items() if not worker.faults.dead}

        def born(name: str) -> None:
            if name in unborn:
                unborn.discard(name)
                if not unborn:
                    ready(self)

        lives = [worker.run(partial(born, name)) for name, worker in self.workers.items()]
        async with self._controlled():
            await until_one_ends(self.site.run_stores(), *lives)

    @contextlib.asynccontextmanager
    async def _controlled(self) -> AsyncIterator[None]:
        self.control_url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        app = Control({**self.workers, **self.site.members}, engine_key(self.site.key)).app()
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            yield
        finally:
            await runner.cleanup()


def _bound(port: int) -> socket.socket:
    try:
        return bind_tcp(HOST, port)
    except OSError as error:
        raise Misconfigured(f"mock.control_port {port}: {error.strerror}; choose another") from error


async def run_node(config: Config, plan: NodePlan, *, key: bytes, ready: Callable[[MockNode], None]) -> None:
    """Serve until cancelled. Raises ``Misconfigured``."""
    tokens = await asyncio.to_thread(load_tokens, plan.model_path)
    gc.freeze()  # what was loaded stays: to look through it for garbage again and again took a third of all time
    try:
        site = Site(config, plan.model_path, tokens, stores=plan.stores, routers=plan.routers, key=key)
        await MockNode(site, plan.workers).run(ready)
    finally:
        tokens.close()
