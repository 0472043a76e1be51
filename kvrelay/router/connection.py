"""A client's connection. What HTTP itself does not allow never gets to the application: it is refused here, in
OpenAI's error shape like every other failure, and without the names of the software below."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable

from aiohttp import web
from aiohttp.web_request import BaseRequest

from kvrelay.router.failures import error_body, unexpected

log = logging.getLogger("kvrelay.router")

SAY_EVERY_S = 10.0
_QUOTED_CHARS = 200


class Refusals:
    """What was refused, a line in ``SAY_EVERY_S``: whoever sends rubbish must not fill the log with it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_until_s = -math.inf
        self._unsaid = 0

    def __repr__(self) -> str:
        return f"<Refusals, {self._unsaid} unsaid>"

    def add(self, remote: str | None, why: str) -> None:
        if self._clock() < self._silent_until_s:
            self._unsaid += 1
            return
        log.warning("refused what %s sent: %s (%d more since the last such line)", remote, why, self._unsaid)
        self._silent_until_s, self._unsaid = self._clock() + SAY_EVERY_S, 0


class Connection(web.RequestHandler):
    """aiohttp's connection, with kvrelay's refusals."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, refusals: Refusals) -> None:
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: it writes no such log
        self._refusals = refusals

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            super().handle_error(request, status, exc, message)  # which logs all of it
        elif request.writer.output_size > 0:
            raise ConnectionError("a response is sent already")
        else:
            self._refusals.add(request.remote, _quoted(message or ""))
        refusal = _refusal(status, message or "")
        refusal.force_close()
        return refusal

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # an Expect that nobody knows; the gateway shapes all others
            resp = _refusal(resp.status, resp.text or "")
        return await super().finish_response(request, resp, start_time)


def _refusal(status: int, said: str) -> web.Response:
    headers = {"server": "kvrelay", "x-request-id": f"req-{secrets.token_hex(12)}"}
    return web.Response(body=_body(status, said), status=status, headers=headers, content_type="application/json")


def _body(status: int, said: str) -> bytes:
    if status >= 500:
        return unexpected().body
    return error_body(f"this request is not HTTP as it is served here: {_quoted(said)}", status)


def _quoted(said: str) -> str:
    return " ".join(said.split())[:_QUOTED_CHARS]
