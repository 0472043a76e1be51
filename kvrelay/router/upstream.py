"""HTTP calls to vLLM workers. It must never retry by itself, and an abandoned call closes its connection, since that
is how a worker learns that nobody waits."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import urlsplit

from kvrelay.errors import Lost
from kvrelay.router.sse import EventSplitter
from kvrelay.router.wire import Wire

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the worker drops them (after 5 s), else a request meets a closing socket."""
MAX_ANSWER_BYTES = 512 << 20
MAX_ERROR_BYTES = 1 << 20


class Target(NamedTuple):
    """Where connections go."""

    host: str
    port: int
    is_tls: bool


class Reply:
    """A worker's answer whose status is known and whose body is not read yet."""

    def __init__(self, upstream: Upstream, target: Target, wire: Wire, status: int) -> None:
        self._upstream = upstream
        self._target = target
        self._wire: Wire | None = wire
        self.status = status

    def __repr__(self) -> str:
        return f"<Reply {self.status} from {self._target.host}:{self._target.port}>"

    async def read(self, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """The whole body. Raises ``Lost`` when the worker dies or the body is over ``limit`` bytes."""
        pieces: list[bytes] = []
        size_bytes = 0
        while piece := await self._some():
            pieces.append(piece)
            size_bytes += len(piece)
            if size_bytes > limit:
                self.close()
                raise Lost(f"a worker's answer is over the limit of {limit} bytes; ask for less")
        return b"".join(pieces)

    async def events(self) -> AsyncIterator[bytes]:
        """Blocks of whole events, as soon as they are there. Raises ``Lost`` when the worker dies."""
        splitter = EventSplitter()
        while piece := await self._some():
            if block := splitter.feed(piece):
                yield block

    async def _some(self) -> bytes:
        """The next bytes; at the end of the answer none, and the connection is another's to use."""
        wire = self._wire
        if wire is None:
            return b""
        try:
            data = await wire.some()
        except OSError as error:
            raise Lost(f"the worker at {self._target.host}:{self._target.port} broke off its answer") from error
        if not data:
            self._wire = None
            self._upstream.keep(self._target, wire)
        return data

    def close(self) -> None:
        """Close the connection, which cancels the request at the worker unless it is finished."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class Upstream:
    """Connections to all workers, kept for a while; ``engine_key`` opens them."""

    def __init__(self, *, connect_s: float, engine_key: str) -> None:
        self._connect_s = connect_s
        self._key = engine_key
        # No limit of its own: admission bounds what is in flight, and a queue here would be invisible to the brain.
        self._idle: dict[Target, dict[Wire, asyncio.TimerHandle]] = {}

    def __repr__(self) -> str:
        return f"<Upstream {sum(map(len, self._idle.values()))} idle connections>"

    async def post(self, url: str, body: bytes, *, request_id: str = "") -> Reply:
        """Send ``body`` and wait for the status. Raises ``Lost``."""
        target, head = _head(url, self._key)
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        request = b"".join((head, f"{named}content-length: {len(body)}\r\n\r\n".encode(), body))
        try:
            wire = self._take(target) or await self._connect(target)
            try:
                return Reply(self, target, wire, await wire.send(request))
            except (OSError, asyncio.CancelledError):
                wire.close()
                raise
        except OSError as error:  # TimeoutError is one
            raise Lost(f"the worker at {url} cannot be reached or hung up ({type(error).__name__})") from error

    async def _connect(self, target: Target) -> Wire:
        loop = asyncio.get_running_loop()
        tls = ssl.create_default_context() if target.is_tls else None
        async with asyncio.timeout(self._connect_s):
            _, wire = await loop.create_connection(Wire, target.host, target.port, ssl=tls)
        return wire

    def _take(self, target: Target) -> Wire | None:
        """The connection that was used last: those that nobody needs any more grow old."""
        idle = self._idle.get(target, {})
        while idle:
            wire = next(reversed(idle))
            self._forget(target, wire).cancel()
            if wire.reusable:
                return wire
        return None

    def _forget(self, target: Target, wire: Wire) -> asyncio.TimerHandle:
        """``wire`` is not idle any more; the timer that would have closed it."""
        idle = self._idle[target]
        expiry = idle.pop(wire)
        if not idle:
            del self._idle[target]
        return expiry

    def keep(self, target: Target, wire: Wire) -> None:
        """The answer was read to its end."""
        if not wire.reusable:
            wire.close()
            return
        idle = self._idle.setdefault(target, {})
        idle[wire] = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._expire, target, wire)

    def _expire(self, target: Target, wire: Wire) -> None:
        self._forget(target, wire)
        wire.close()

    async def close(self) -> None:
        """Close what is idle; replies close their own."""
        for target, wire in [(target, wire) for target, idle in self._idle.items() for wire in idle]:
            self._forget(target, wire).cancel()
            wire.close()
        await asyncio.sleep(0)


@functools.lru_cache(maxsize=1024)
def _head(url: str, key: str) -> tuple[Target, bytes]:
    """Where ``url`` leads, and how every request to it begins. Workers register as http(s)://host:port."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    target = Target(host=parts.hostname or "", port=parts.port or (443 if is_tls else 80), is_tls=is_tls)
    lines = (
        f"POST {parts.path} HTTP/1.1",
        f"host: {parts.netloc}",
        f"authorization: Bearer {key}",
        "content-type: application/json",
        "",
    )
    return target, "\r\n".join(lines).encode()
