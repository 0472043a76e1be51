"""The OpenAI server of one mock worker. It must never let anybody in who does not hold the engines' key."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from kvrelay.deploy.engine_guard import OPEN_PATHS
from kvrelay.deploy.mock.answer import ChatShape, CompletionShape, Shape, Style
from kvrelay.deploy.mock.answering import Answering, Served
from kvrelay.deploy.mock.asked import Body, read_body
from kvrelay.deploy.mock.faults import Params
from kvrelay.deploy.mock.intake import Intake
from kvrelay.deploy.mock.metrics import exposition
from kvrelay.deploy.mock.vocabulary import Vocabulary
from kvrelay.errors import BadRequest

MAX_BODY_BYTES = 64 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Routes of one worker."""

    def __init__(self, served: Served, intake: Intake, vocabulary: Vocabulary, *, model: str, engine_key: str) -> None:
        self._served = served
        self._intake = intake
        self._vocabulary = vocabulary
        self._model = model
        self._expected = f"Bearer {engine_key}".encode()

    def __repr__(self) -> str:
        return f"<Api of {self._served!r}>"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._border])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _border(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode()
        if request.path not in OPEN_PATHS and not hmac.compare_digest(given, self._expected):
            return _refusal(401, "this engine answers its router only; ask the router")
        try:
            await self._served.reachable()
            return await handler(request)
        except BadRequest as error:
            return _refusal(error.status, str(error), error.param)
        except ConnectionError as error:
            if request.transport is not None and not request.transport.is_closing():
                raise
            raise asyncio.CancelledError from error  # who asked is gone: nothing for a log

    # ------------------------------------------------------------ generation

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, chat=False)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, chat=True)

    async def _generate(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        if self._served.faults.status:
            return _refusal(self._served.faults.status, "a fault that was asked for")
        body = read_body(await http.read())
        request_id = http.headers.get("x-request-id") or secrets.token_hex(8)
        sequences = await self._intake.sequences(body, request_id, self._served.leg(body), chat=chat)
        shape = self._shape(body, request_id, chat=chat)
        answer = Answering(self._served, shape, sequences, streams=bool(body.stream))
        try:
            if body.stream:
                return await self._stream(http, body, answer)
            await answer.until_whole()
            await self._served.reachable()
            if answer.broken:
                return _cut(http)
            return web.Response(body=shape.whole(sequences), content_type="application/json")
        finally:
            answer.close()

    def _shape(self, body: Body, request_id: str, *, chat: bool) -> Shape:
        style = Style(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            created=int(time.time() + self._served.faults.clock_s),
            model=self._model,
            token_ids=bool(body.return_token_ids),
            logprobs=body.wants_logprobs,
            garbage=self._served.faults.params is Params.GARBAGE,
        )
        return (ChatShape if chat else CompletionShape)(style, self._vocabulary, body.choices)

    async def _stream(self, http: web.Request, body: Body, answer: Answering) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)  # like vLLM: the status does not wait for the engine
        while not answer.over:
            events = await answer.events()
            await self._served.reachable()
            await response.write(events)
        if answer.broken:
            return _cut(http)
        await response.write(answer.last(usage=body.wants_usage))
        return response

    # ------------------------------------------------------------ the rest

    async def _render_completion(self, http: web.Request) -> web.StreamResponse:
        ids = await self._intake.completion_ids(read_body(await http.read()))
        return _json([{"token_ids": each} for each in ids])

    async def _render_chat(self, http: web.Request) -> web.StreamResponse:
        ids = await self._intake.chat_ids(read_body(await http.read()))
        return _json({"token_ids": ids, "features": None})

    async def _models(self, _http: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "mock"}]})

    async def _health(self, _http: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _metrics(self, _http: web.Request) -> web.StreamResponse:
        text = exposition(self._served.engine.scheduler, self._model)
        return web.Response(text=text, headers={"content-type": "text/plain; version=0.0.4"})


def _cut(http: web.Request) -> web.StreamResponse:
    """Break the connection off, as a dying process would."""
    if http.transport is not None:
        http.transport.abort()
    return web.Response()


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _refusal(status: int, message: str, param: str | None = None) -> web.Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)
