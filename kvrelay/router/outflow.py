"""Sends answers to their clients, streamed ones as they come. It must never hold more than a little of one while its
client reads nothing, nor wait for such a client for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import HttpVersion11, web

from kvrelay.router.answers import StreamedAnswer
from kvrelay.router.sse import DONE

STALL_S = 60.0
"""Longest time for which a client may read nothing of a streamed answer: until it does, workers hold its KV."""
SHORT_BYTES = 1 << 14
"""A client that has read all before takes as much without being waited for."""
CUT_S = 1.0
"""Longest time until a connection that was cut is known to be gone."""
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class EventStream(web.StreamResponse):
    """A response whose head goes out together with its first event: a packet less, and its client wakes once."""

    _send_headers_immediately = False  # aiohttp's own switch, which its ``Response`` turns as well
    is_over = False
    """Its client has the end of its body."""

    async def write_eof(self, data: bytes = b"") -> None:
        await super().write_eof(data)
        self.is_over = True


async def send_whole(http: web.Request, body: bytes) -> web.Response:
    """An answer in a piece. A short one goes out before anything is noted of it; who reads a long one slowly holds up
    nothing but its own connection."""
    response = web.Response(body=body, content_type="application/json")
    if len(body) <= SHORT_BYTES and Client(http).is_ready:
        await response.prepare(http)
        await response.write_eof()
    return response


async def send(http: web.Request, stream: StreamedAnswer) -> web.StreamResponse:
    """All of ``stream``. Raises ``ConnectionResetError`` when the client is gone or reads nothing for too long."""
    response = EventStream(headers=_HEADERS)
    await response.prepare(http)
    try:
        await _pass_on(http, stream, response)
    except asyncio.CancelledError:
        if not response.is_over:
            raise
        # Its client may well hang up then, while the end of D's own body is awaited: it has a whole answer.
    return response


async def _pass_on(http: web.Request, stream: StreamedAnswer, response: EventStream) -> None:
    client = Client(http)
    shortened = ended = False
    async for block in stream.blocks:
        ended = block.endswith(DONE)
        if shortened and not ended and client.is_ready:
            client.write(block)
            continue
        sending = response.write_eof(block) if ended else response.write(block)
        # A timer costs more than to send an event, and there is nothing to wait for.
        await (sending if client.is_ready and len(block) <= SHORT_BYTES else _taken(http, sending))
        if client.knows_chunks and not shortened:
            stream.shorten(client)
            shortened = True
    if not ended:
        await _taken(http, response.write_eof())


class Client:
    """The way to one that keeps up, past all that is there for those who do not."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.knows_chunks = http.version >= HttpVersion11

    def __repr__(self) -> str:
        return f"<Client at {self._http.remote}>"

    @property
    def is_ready(self) -> bool:
        """It is there and has read all before."""
        transport = self._http.transport
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def write(self, block: bytes) -> None:
        """Send ``block`` as a chunk. To be called when it is ready and the head is sent."""
        transport = self._http.transport
        assert transport is not None, "it is ready"
        transport.write(b"%x\r\n%b\r\n" % (len(block), block))


async def _taken(http: web.Request, sending: Awaitable[None]) -> None:
    """Raises ``ConnectionResetError`` when the client reads nothing for too long."""
    try:
        async with asyncio.timeout(STALL_S):
            await sending
    except TimeoutError as error:
        if http.transport is not None:
            http.transport.abort()
            await asyncio.sleep(CUT_S)  # whose end cancels this handler, as that of a client that hangs up does
        raise ConnectionResetError(f"the client read nothing for {STALL_S:g} s") from error
