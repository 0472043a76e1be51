"""The OpenAI API. It must never pass a route on to a worker by name: what is not listed here does not exist."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from kvrelay.errors import BadRequest, KvrelayError, Overloaded
from kvrelay.fleet.actual import actual
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.fleet.health import examine
from kvrelay.fleet.ledger import KEPT_REQUESTS, KEPT_UNSTARTED
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.router import outflow
from kvrelay.router.answers import StreamedAnswer, WholeAnswer
from kvrelay.router.bodies import Bodies, Claim
from kvrelay.router.connection import connection
from kvrelay.router.desk import Desk
from kvrelay.router.exchange import Exchange
from kvrelay.router.failures import Failure, describe, error_body, unexpected
from kvrelay.router.intake import Intake
from kvrelay.router.keys import Keyring, Tenant
from kvrelay.router.promises import Promises
from kvrelay.router.prompts import PromptReader
from kvrelay.router.request import Kind, parse
from kvrelay.router.shortage import Shortage
from kvrelay.router.telemetry import Telemetry
from kvrelay.types import CLIENT_CLOSED

log = logging.getLogger("kvrelay.router")

MAX_READING = 1024
"""Requests whose bodies have arrived and are being tokenised; more are turned away."""

MAX_HELD_BYTES = 1 << 30
"""Bodies of all requests that are being read or answered: 4,096 requests of 256 KiB, or 32 of the longest."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ID = web.RequestKey("kvrelay_request_id", str)


class Gateway:
    """HTTP in, HTTP out; everything between is the desk's."""

    def __init__(
        self,
        brain: Brain,
        desk: Desk,
        reader: PromptReader,
        keys: Keyring,
        promises: Promises,
        telemetry: Telemetry,
        clock: Callable[[], float],
        shortage: Shortage,
        *,
        max_body_bytes: int,
        drain: DrainCommand,
    ) -> None:
        self._brain = brain
        self._drain = drain
        self._desk = desk
        self._reader = reader
        self._keys = keys
        self._promises = promises
        self._telemetry = telemetry
        self._clock = clock
        self._shortage = shortage
        self._max_body_bytes = max_body_bytes
        self._intake = Intake(max_body_bytes)
        self._reading = 0
        self._bodies = Bodies(MAX_HELD_BYTES)

    def __repr__(self) -> str:
        return f"<Gateway {self._desk!r}>"

    def app(self) -> web.Application:
        """The application with its routes."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._border])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kvrelay/requests", self._running)
        app.router.add_get("/kvrelay/requests/{id}", self._timeline)
        app.on_response_prepare.append(_name_response)
        return app

    # ------------------------------------------------------------ border

    @web.middleware
    async def _border(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every request gets an id, every failure becomes an answer in OpenAI's shape."""
        request[_ID] = f"req-{os.urandom(12).hex()}"
        connection(request).begin(request)
        try:
            response = await self._answered(request, handler)
            if request.content.exception() is not None:
                await _hang_up_after(request, response)
        except ConnectionError as error:  # its client is gone: no error, and nothing for a log
            raise asyncio.CancelledError from error
        resource = request.match_info.route.resource
        self._telemetry.responded(resource.canonical if resource else "unknown", response.status)
        return response

    async def _answered(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(http)
        except KvrelayError as error:
            return _failed(describe(error))
        except web.HTTPException as error:
            return _failed(_http_failure(error, http))
        except Exception as error:  # border: a bug becomes a clean 500 and a line in the log
            if isinstance(error, ConnectionError) and _is_gone(http):
                raise
            log.exception("request %s failed", http[_ID])
            return _failed(unexpected())

    def _tenant(self, http: web.Request) -> Tenant:
        return self._keys.authenticate(http.headers.get("authorization"))

    # ------------------------------------------------------------ generation

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.COMPLETION)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.CHAT)

    async def _generate(self, http: web.Request, kind: Kind) -> web.StreamResponse:
        received_s, tenant = self._clock(), self._tenant(http)
        _require_json(http)
        connection(http).answer(http)
        with self._bodies.claim() as claim:
            exchange = await self._opened(http, kind, claim, tenant, received_s)
            return await self._driven(http, exchange)

    async def _driven(self, http: web.Request, exchange: Exchange) -> web.StreamResponse:
        status, why = unexpected().status, ""
        try:
            response = await self._respond(http, exchange)
            status = response.status
        except KvrelayError as error:
            failed = describe(error)
            status, why = failed.status, failed.message
            raise
        except (asyncio.CancelledError, ConnectionError):
            status = CLIENT_CLOSED
            raise
        finally:
            self._desk.close(http[_ID], status, why)
        return response

    async def _opened(self, http: web.Request, kind: Kind, claim: Claim, tenant: Tenant, received_s: float) -> Exchange:
        """The request read, tokenised and started. Nothing is reserved unless this returns."""
        body = await self._intake.read(http, claim)
        if self._reading >= MAX_READING:
            raise Overloaded(f"{self._reading} requests are being read already; retry", RETRY_AFTER_S)
        self._reading += 1
        try:
            request = parse(kind, body)
            ready = self._desk.ready(request.model)
            prompts = await self._reader.read(request, ready.workers, ready.context_tokens)
        finally:
            self._reading -= 1
        slo = self._promises.of(tenant.name, http.headers)
        return self._desk.open(
            request, prompts, ready, request_id=http[_ID], tenant=tenant, slo=slo, received_s=received_s
        )

    async def _respond(self, http: web.Request, exchange: Exchange) -> web.StreamResponse:
        match await exchange.answer():
            case WholeAnswer(body=body):
                return await outflow.send_whole(http, body)
            case StreamedAnswer() as stream:
                return await outflow.send(http, stream)

    # ------------------------------------------------------------ the rest

    async def _models(self, http: web.Request) -> web.Response:
        self._tenant(http)
        return _json({"object": "list", "data": [self._card(name) for name in self._brain.fleet.models()]})

    async def _model(self, http: web.Request) -> web.Response:
        self._tenant(http)
        name, models = http.match_info["model"], self._brain.fleet.models()
        if name not in models:
            served = ", ".join(models) or "none yet"
            raise BadRequest(f"the model {name[:200]!r} does not exist; this router serves {served}", status=404)
        return _json(self._card(name))

    def _card(self, model: str) -> dict[str, object]:
        """A model as OpenAI lists it, and as vLLM does: the longest prompt + answer that each of its workers takes."""
        longest = self._brain.fleet.max_model_len(model)
        return {"id": model, "object": "model", "created": 0, "owned_by": "kvrelay", "max_model_len": longest}

    async def _health(self, _http: web.Request) -> web.Response:
        health = examine(self._brain, self._clock(), self._drain, short=self._shortage.why)
        return _json(health, 200 if health.serving else 503)

    async def _metrics(self, _http: web.Request) -> web.Response:
        return web.Response(body=self._telemetry.exposition(), headers={"content-type": "text/plain; version=0.0.4"})

    async def _running(self, http: web.Request) -> web.Response:
        return _json({"requests": self._desk.running(self._tenant(http).name)})

    async def _timeline(self, http: web.Request) -> web.Response:
        tenant = self._tenant(http)
        request_id = http.match_info["id"]
        timeline = self._brain.ledger.get(request_id)
        if timeline is None or timeline.tenant != tenant.name:
            kept = f"each router keeps its last {KEPT_REQUESTS:,}, and {KEPT_UNSTARTED} that were not begun"
            raise BadRequest(f"no such request; {kept}, by x-request-id", status=404)
        now = self._desk.request_status(request_id)
        return _json(timeline.report() | {"actual": actual(timeline).report()} | ({"now": now} if now else {}))


def _require_json(http: web.Request) -> None:
    """A page in a browser may send any other type here without asking first. Raises ``BadRequest`` (415)."""
    if http.content_type != "application/json" and not http.content_type.endswith("+json"):
        sent = http.headers.get("content-type", "")[:100]
        said = f"content-type is {sent!r}" if sent else "content-type is missing"
        raise BadRequest(f"{said}; send the body with content-type: application/json", status=415)


def _is_gone(http: web.Request) -> bool:
    """Its client is."""
    return http.transport is None or http.transport.is_closing()


async def _hang_up_after(http: web.Request, response: web.StreamResponse) -> None:
    """Send ``response`` and close: what follows a body that cannot be read is not to be taken for a request."""
    response.force_close()
    await response.prepare(http)
    await response.write_eof()
    http.protocol.force_close()


async def _name_response(http: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault("x-request-id", http.get(_ID, ""))
    response.headers["server"] = "kvrelay"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _failed(failure: Failure) -> web.Response:
    return web.Response(
        body=failure.body, status=failure.status, headers=failure.headers, content_type="application/json"
    )


def _http_failure(error: web.HTTPException, http: web.Request) -> Failure:
    """What aiohttp itself refuses: unknown routes, wrong methods."""
    served = ", ".join(
        f"{route.method} {route.resource.canonical}"
        for route in http.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    )
    message = f"{http.method} {http.path[:200]} is not served here; these are: {served}"
    allow = {"allow": error.headers["allow"]} if "allow" in error.headers else {}
    return Failure(status=error.status, body=error_body(message, error.status), headers=allow)
