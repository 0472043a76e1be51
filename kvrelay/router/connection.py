"""A client's connection. What HTTP itself does not allow never gets to the application: it is refused here, in
OpenAI's error shape like every other failure, and without the names of the software below."""

from __future__ import annotations

import asyncio
import secrets

from aiohttp import web
from aiohttp.web_request import BaseRequest

from kvrelay.router.failures import error_body, unexpected

_QUOTED_CHARS = 200


class Connection(web.RequestHandler):
    """aiohttp's connection, with kvrelay's refusals."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: it writes no such log

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)
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
    why = " ".join(said.split())[:_QUOTED_CHARS]
    return error_body(f"this request is not HTTP as it is served here: {why}", status)
