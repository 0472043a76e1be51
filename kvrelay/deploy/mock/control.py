"""The route by which faults are given to mock workers while they run. It must never listen beyond loopback."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from aiohttp import web

from kvrelay.deploy.mock.faults import Faults
from kvrelay.errors import Misconfigured

HOST = "127.0.0.1"
MAX_BODY_BYTES = 1 << 16

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sufferer(Protocol):
    """A worker or a store."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def faults(self) -> Faults: ...

    def suffer(self, faults: Faults) -> None:
        """Raises ``Misconfigured`` for what it cannot have."""


class WorkerView(msgspec.Struct, frozen=True):
    """One worker or store, as the route shows it."""

    name: str
    role: str
    url: str
    faults: Faults


class Control:
    """``GET /workers`` shows all, stores too; ``PUT /workers/NAME/faults`` changes one. Both want the engines' key."""

    def __init__(self, workers: Mapping[str, Sufferer], engine_key: str) -> None:
        self._workers = workers
        self._expected = f"Bearer {engine_key}".encode()

    def __repr__(self) -> str:
        return f"<Control of {len(self._workers)} workers>"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._border])
        app.router.add_get("/workers", self._show)
        app.router.add_put("/workers/{name}/faults", self._give)
        return app

    @web.middleware
    async def _border(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self._expected):
            return _error(401, "show the engines' key: kvrelay fault --key-file FILE")
        return await handler(request)

    async def _show(self, _http: web.Request) -> web.StreamResponse:
        return _json([_view(worker) for worker in self._workers.values()])

    async def _give(self, http: web.Request) -> web.StreamResponse:
        worker = self._workers.get(http.match_info["name"])
        if worker is None:
            return _error(404, f"no such worker; there are {', '.join(self._workers)}")
        try:
            worker.suffer(msgspec.json.decode(await http.read(), type=Faults))
        except msgspec.DecodeError as error:
            return _error(400, f"these are no faults: {error}")
        except Misconfigured as error:
            return _error(400, str(error))
        return _json(_view(worker))


def _view(worker: Sufferer) -> WorkerView:
    return WorkerView(name=worker.name, role=str(worker.role), url=worker.url, faults=worker.faults)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.Response(body=msgspec.json.encode({"error": message}), status=status, content_type="application/json")
