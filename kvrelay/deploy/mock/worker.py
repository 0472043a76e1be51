"""A mock worker's name and port, and who lives there: one incarnation after the other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from kvrelay.channel import bind_tcp, reachable
from kvrelay.deploy.mock.faults import Condition, Faults
from kvrelay.deploy.mock.incarnation import Incarnation
from kvrelay.deploy.mock.page_store import MockStore
from kvrelay.deploy.mock.roster import WorkerPlan
from kvrelay.deploy.mock.site import Site
from kvrelay.deploy.ports import free_port
from kvrelay.errors import Misconfigured
from kvrelay.race import until_one_ends

_TRIES = 10


class MockWorker:
    """Lives, and lives again, as its faults want it."""

    def __init__(self, plan: WorkerPlan, site: Site) -> None:
        self.name = plan.name
        self.role = plan.role
        self._site = site
        self._store: MockStore = site.stores[plan.store]
        self._condition = Condition(plan.faults)
        self._changed = asyncio.Event()
        self.life: Incarnation | None = None
        """Who lives there now; None while it is dead."""
        self._socket: socket.socket | None = _settled(site.config.worker.host)
        """For the next life, as soon as it is known; bound at once, or two workers might choose one port."""
        self._address: tuple[str, int] = self._socket.getsockname()
        self.url = f"http://{reachable(self._address[0])}:{self._address[1]}"
        if self.faults.dead:
            self._take_socket().close()

    def __repr__(self) -> str:
        return f"<MockWorker {self.name} at {self.url}, {self.life or 'dead'}>"

    @property
    def faults(self) -> Faults:
        return self._condition.faults

    def suffer(self, faults: Faults) -> None:
        """Have these faults from now on, and no others."""
        self._condition.faults = faults
        if self.life is not None:
            self.life.obey()
        self._changed.set()

    async def run(self, born: Callable[[], None] = lambda: None) -> None:
        """Until cancelled; ``born`` is called whenever it serves. Raises ``Misconfigured`` when its port is taken."""
        while True:
            await self._until(dead=False)
            life = Incarnation(self._site, self.name, self.role, self._store, self.url, self._condition)
            self.life = life
            try:
                await until_one_ends(life.run(self._take_socket(), born), self._death(life))
            finally:
                self.life = None

    def _take_socket(self) -> socket.socket:
        sock, self._socket = self._socket or _bound(*self._address), None
        return sock

    async def _death(self, life: Incarnation) -> None:
        await self._until(dead=True)
        life.die()

    async def _until(self, *, dead: bool) -> None:
        while self.faults.dead is not dead:
            self._changed.clear()
            await self._changed.wait()


def _settled(host: str) -> socket.socket:
    """A socket at a free port. Raises ``Misconfigured``."""
    for _ in range(_TRIES):
        with contextlib.suppress(Misconfigured):  # somebody else was faster
            return _bound(host, free_port(host))
    return _bound(host, free_port(host))


def _bound(host: str, port: int) -> socket.socket:
    try:
        return bind_tcp(host, port)
    except OSError as error:
        raise Misconfigured(f"a mock worker cannot listen on {host}:{port} ({error.strerror}); start again") from error
