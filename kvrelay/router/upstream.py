"""HTTP calls to vLLM workers. It must never retry by itself, and an abandoned call closes its connection, since that
is how a worker learns that nobody waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp

from kvrelay.errors import Lost
from kvrelay.router.sse import EventSplitter

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the worker drops them (after 5 s), else a request meets a closing socket."""
MAX_ANSWER_BYTES = 512 << 20
MAX_ERROR_BYTES = 1 << 20
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within about 15 s that the worker's machine is gone, also while nothing is said."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return made


class Reply:
    """A worker's answer whose status is known and whose body is not read yet."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    def __repr__(self) -> str:
        return f"<Reply {self.status} from {self._response.url.origin()}>"

    @property
    def status(self) -> int:
        return self._response.status

    async def read(self, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """The whole body. Raises ``Lost`` when the worker dies or the body is over ``limit`` bytes."""
        body = bytearray()
        async for chunk in self._chunks():
            body += chunk
            if len(body) > limit:
                self.close()
                raise Lost(f"a worker's answer is over the limit of {limit} bytes; ask for less")
        self._response.release()
        return bytes(body)

    async def events(self) -> AsyncIterator[bytes]:
        """Blocks of whole events, as soon as they are there. Raises ``Lost`` when the worker dies."""
        splitter = EventSplitter()
        async for chunk in self._chunks():
            if block := splitter.feed(chunk):
                yield block

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except _BROKEN as error:
            raise Lost(f"the worker at {self._response.url.origin()} broke off its answer") from error

    def close(self) -> None:
        """Close the connection, which cancels the request at the worker unless it is finished."""
        self._response.close()


class Upstream:
    """One connection pool for all workers; ``engine_key`` opens them."""

    def __init__(self, *, connect_s: float, engine_key: str) -> None:
        # No limit of its own: admission bounds what is in flight, and a queue here would be invisible to the brain.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers={"authorization": f"Bearer {engine_key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    def __repr__(self) -> str:
        return f"<Upstream {'closed' if self._session.closed else 'open'}>"

    async def post(self, url: str, body: bytes, *, request_id: str = "") -> Reply:
        """Send ``body`` and wait for the status. Raises ``Lost``."""
        headers = {"content-type": "application/json"}
        if request_id:
            headers["x-request-id"] = request_id
        try:
            return Reply(await self._session.post(url, data=body, headers=headers, allow_redirects=False))
        except _BROKEN as error:
            raise Lost(f"the worker at {url} cannot be reached or hung up ({type(error).__name__})") from error

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)
