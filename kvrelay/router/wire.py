"""One HTTP/1.1 connection to a worker, one request at a time. It must never give out an answer that was cut short as a
whole one, nor hold more of it than ``HELD_BYTES`` while nobody reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import httptools

HELD_BYTES = 1 << 18
"""A worker that writes faster than the client reads is made to wait from here on."""
MAX_HEAD_BYTES = 1 << 16
_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
"""Headers that say where a body ends; without them it ends with the connection."""
_FIRST_FINAL = 200
"""Statuses below only announce the real one."""
_MALFORMED = (httptools.HttpParserError, httptools.HttpParserUpgrade)


class Wire(asyncio.Protocol):
    """Bytes in, a status and pieces of a body out. Every failure is an ``OSError``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._status: asyncio.Future[int] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._head_bytes = 0
        self._paused = False
        self._whole = True
        """No answer is awaited, or all of it is here."""
        self._measured = False
        self._error: OSError | None = None
        self._keeps = True
        self.passes: Callable[[bytes], bool] | None = None
        """Is given what comes while somebody waits in ``some`` for more of an answer; true: it is taken care of."""

    def __repr__(self) -> str:
        state = "idle" if self._whole else f"reading, {self._held_bytes} bytes held"
        return f"<Wire {state if self._error is None else 'broken'}>"

    @property
    def reusable(self) -> bool:
        """Another request may follow."""
        return self._whole and self._keeps and self._error is None and not self._pieces

    async def send(self, request: bytes) -> int:
        """Send a whole request; the status of its answer. Raises ``OSError``."""
        if self._error is not None:
            raise self._error
        self._whole, self._measured, self._head_bytes, self.passes = False, False, 0, None
        self._status = self._loop.create_future()
        self._transport.write(request)
        return await self._status

    async def some(self) -> bytes:
        """The next bytes of the body as soon as there are any; none at its end. Raises ``OSError``."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._whole:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._taken()

    def _taken(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held_bytes = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Hang up at once, which cancels at the worker what is not finished."""
        self._fail(ConnectionAbortedError("closed"))

    def _fail(self, error: OSError) -> None:
        self._error = self._error or error
        self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._error is not None and self._status is not None and not self._status.done():
            self._status.set_exception(self._error)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        # It notices within about 15 s that the worker's machine is gone, also while nothing is said.
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._whole:
            self._fail(ConnectionAbortedError("it spoke without being asked"))
            return
        try:
            self._parser.feed_data(data)
        except _MALFORMED as error:
            self._fail(ConnectionAbortedError(f"its answer is no HTTP: {error}"))
            return
        if self._status is not None and not self._status.done():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail(ConnectionAbortedError("the head of its answer does not end"))
                return
        if not self._passed_on():
            self._wake()

    def _passed_on(self) -> bool:
        """What came just now needs nobody to wake up."""
        waits = self._waiter is not None and not self._waiter.done()
        if self.passes is None or not waits or self._whole or not self._pieces:
            return False
        data = self._taken()
        if self.passes(data):
            return True
        self._pieces.append(data)
        self._held_bytes = len(data)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        headed = self._status is not None and self._status.done()
        if not self._whole and headed and not self._measured and error is None:
            self._whole = True
        self._keeps = False
        if not self._whole or not headed:
            self._error = self._error or ConnectionResetError("it hung up")
        self._wake()

    # ------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        self._keeps = self._keeps and not self._whole  # something follows that nobody asked for

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._measured = self._measured or name.lower() in _LENGTHS

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= _FIRST_FINAL and self._status is not None and not self._status.done():
            self._status.set_result(status)

    def on_body(self, body: bytes) -> None:
        if self._whole:
            return
        self._pieces.append(body)
        self._held_bytes += len(body)
        if self._held_bytes > HELD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < _FIRST_FINAL:
            return
        self._keeps = self._keeps and self._parser.should_keep_alive()
        self._whole = True
