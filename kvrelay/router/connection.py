"""A client's connection. What HTTP itself does not allow never gets to the application: it is refused here, in
OpenAI's error shape like every other failure, and without the names of the software below."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import secrets
import termios
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_request import BaseRequest

from kvrelay.errors import Overloaded
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.router.clients import HEAD_S, Clients, Ending
from kvrelay.router.failures import Failure, describe, error_body, unexpected
from kvrelay.router.shortage import Seldom

MAX_BEHIND_BYTES = 64 << 20
"""Most that is thrown away of what a client sends behind a request that is being answered: twice the longest body."""
CUT_S = 5.0
"""Time for a client to take what was written to it before its connection is cut."""
LINGER_S = 2.0
"""Time for a client that still sends to read its answer: a connection that is closed on unread bytes is reset, and the
answer's end is lost with it."""
FULL = "this router has as many client connections as it can serve; retry"
_QUOTED_CHARS = 200


class Refusals:
    """What was refused, a line now and then: whoever sends rubbish must not fill the log with it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._line = Seldom(clock)

    def __repr__(self) -> str:
        return f"<Refusals, {self._line!r}>"

    def add(self, remote: str | None, why: str) -> None:
        self._line.warn(f"refused what {remote} sent: {why}")


class Connection(web.RequestHandler):
    """aiohttp's connection, with kvrelay's refusals."""

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, refusals: Refusals, clients: Clients
    ) -> None:
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]  # None: it writes no such log
        self._refusals = refusals
        self._clients = clients
        self._head_bytes = 0
        """What came since the last request, or of it."""
        self._answering: BaseRequest | None = None
        self._behind_bytes = 0
        """What was thrown away."""
        self._is_last = False
        """Nothing behind the request that is answered will be."""

    # ------------------------------------------------------------ who comes and goes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._clients.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._clients.left(self)
        super().connection_lost(exc)

    def begin(self, http: web.Request) -> None:
        """The head of ``http`` is here."""
        self._head_bytes = 0
        self._clients.asks(self)

    def answer(self, http: web.Request) -> None:
        """Workers are to be asked for ``http``, as long as its client stays. Raises ``Overloaded``."""
        if self._clients.is_surplus(self):
            raise Overloaded(FULL, RETRY_AFTER_S)
        self._answering = http
        self._listen()

    def hang_up(self, ending: Ending) -> None:
        """End it; who has said something, or is not let in, is told why."""
        transport = self.transport
        if transport is None:
            return
        if ending is Ending.STALLED:
            transport.abort()
            return
        if ending in (Ending.REFUSED, Ending.EVICTED) and (self._head_bytes or ending is Ending.REFUSED):
            transport.write(_raw(describe(Overloaded(FULL, RETRY_AFTER_S))))
        elif ending is Ending.SILENT and self._head_bytes:
            late = f"the head of the request did not arrive within {HEAD_S:g} s"
            transport.write(_raw(Failure(status=408, body=error_body(f"{late}; send it faster", 408))))
            self._refusals.add(self._remote, late)
        self.force_close()
        if transport.get_write_buffer_size():
            self._loop.call_later(CUT_S, transport.abort)

    @property
    def unsent_bytes(self) -> int:
        transport = self.transport
        if transport is None:
            return 0
        held_by_system = array.array("i", [0])
        with contextlib.suppress(OSError):  # closed meanwhile, or not Linux
            fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held_by_system)
        return transport.get_write_buffer_size() + held_by_system[0]

    @property
    def _remote(self) -> str:
        name = self.peername
        return str(name[0]) if isinstance(name, tuple) else str(name)

    # ------------------------------------------------------------ what comes

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            self._throw_away(data)
            return
        if data:  # else it is aiohttp, which goes on with what it put off
            self._head_bytes += len(data)
            self._clients.speaks(self)
        super().data_received(data)
        self._listen()

    def _listen(self) -> None:
        """aiohttp stops reading when much lies unread behind the request that is answered, and so would not learn that
        its client is gone. That much is read and thrown away; the connection ends with this answer."""
        transport = self.transport
        if self._answering is None or transport is None or transport.is_reading():
            return
        if self._answering.content.is_eof():
            self._is_last = True
            self.close()
            transport.resume_reading()

    def _throw_away(self, data: bytes) -> None:
        self._behind_bytes += len(data)
        if self._behind_bytes > MAX_BEHIND_BYTES and self.transport is not None:
            self._refusals.add(self._remote, f"{self._behind_bytes} bytes behind a request that is being answered")
            self.transport.abort()

    # ------------------------------------------------------------ what goes

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
        self._answering = None
        if isinstance(resp, web.HTTPException):  # an Expect that nobody knows; the gateway shapes all others
            resp = _refusal(resp.status, resp.text or "")
        if self._is_last or self._clients.is_surplus(self):
            resp.force_close()
        self._clients.sends(self)
        finished = await super().finish_response(request, resp, start_time)
        self._head_bytes = 0
        self._clients.answered(self)
        if self._is_last and self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()
            await asyncio.sleep(LINGER_S)  # or until it has closed, which cancels this task
        return finished


def connection(http: web.Request) -> Connection:
    """The one that ``http`` came on."""
    assert isinstance(http.protocol, Connection), "the router serves no others"
    return http.protocol


def _refusal(status: int, said: str) -> web.Response:
    headers = {"server": "kvrelay", "x-request-id": _request_id()}
    return web.Response(body=_body(status, said), status=status, headers=headers, content_type="application/json")


def _raw(failure: Failure) -> bytes:
    """``failure`` as bytes, for a client without a request that could be answered."""
    headers = failure.headers | {
        "server": "kvrelay",
        "x-request-id": _request_id(),
        "content-type": "application/json",
        "content-length": str(len(failure.body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + failure.body


def _request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _body(status: int, said: str) -> bytes:
    if status >= 500:
        return unexpected().body
    return error_body(f"this request is not HTTP as it is served here: {_quoted(said)}", status)


def _quoted(said: str) -> str:
    return " ".join(said.split())[:_QUOTED_CHARS]
