"""HTTP calls to vLLM workers. It must never retry by itself, and an abandoned call closes its connection, since that
is how a worker learns that nobody waits."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import ssl
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from kvrelay.errors import EXHAUSTED, Exhausted, Lost, Unasked
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.router.shortage import Lack, Shortage
from kvrelay.router.sse import END, EventSplitter
from kvrelay.router.wire import Wire

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the worker drops them (after 5 s), else a request meets a closing socket."""
MAX_ANSWER_BYTES = 512 << 20
MAX_ERROR_BYTES = 1 << 20


class Target(NamedTuple):
    """The address that connections to a worker go to."""

    host: str
    port: int
    is_tls: bool


class Reply:
    """A worker's answer whose status is known and whose body is not read yet."""

    def __init__(self, upstream: Upstream, target: Target, wire: Wire, status: int) -> None:
        self._upstream = upstream
        self._target = target
        self._wire: Wire | None = wire
        self._splitter = EventSplitter()
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
        while piece := await self._some():
            if block := self._splitter.feed(piece):
                yield block

    def pass_to(self, take: Callable[[bytes], bool]) -> None:
        """Offer ``take`` at once each block that comes while ``events`` waits, which gets those that are refused."""
        if self._wire is not None:
            self._wire.passes = lambda data: self._splitter.is_empty and data.endswith(END) and take(data)

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
            self._wire = wire.passes = None
            self._upstream.keep(self._target, wire)
        return data

    def close(self) -> None:
        """Close the connection, which cancels the request at the worker unless it is finished."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class Call:
    """A request to a worker until its status is known."""

    def __init__(self, upstream: Upstream, url: str, target: Target, request: bytes) -> None:
        self._upstream = upstream
        self._url = url
        self._target = target
        self._request = request
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None

    def __repr__(self) -> str:
        return f"<Call of {self._url}>"

    async def reply(self) -> Reply:
        """Send it and wait for the status. Raises ``Lost``, ``Unasked`` where nobody could be reached, ``Exhausted``
        where this router had no descriptor to try with."""
        failed: type[Lost] = Unasked
        try:
            wire = self._wire = self._upstream.take(self._target) or await self._connected()
            failed = Lost
            return Reply(self._upstream, self._target, wire, await wire.send(self._request))
        except OSError as error:  # TimeoutError is one
            self.abandon()
            if failed is Unasked and error.errno in EXHAUSTED:
                raise self._upstream.exhausted(error) from error
            why = f"the worker at {self._url} cannot be reached or hung up ({type(error).__name__})"
            raise failed(why) from error
        except asyncio.CancelledError:
            self.abandon()
            raise

    async def _connected(self) -> Wire:
        """A task of its own, which this call can end without ending who waits for it."""
        connecting = self._connecting = asyncio.create_task(self._upstream.connect(self._target))
        try:
            return await connecting
        except asyncio.CancelledError:
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise  # nobody waits any more
            raise ConnectionAbortedError("called off") from None

    def abandon(self) -> None:
        """Hang up at once, whatever it waits for: ``reply`` raises ``Lost``."""
        if self._wire is not None:
            self._wire.close()
        elif self._connecting is not None:
            self._connecting.cancel()


class Upstream:
    """Connections to all workers, kept for a while; ``engine_key`` opens them."""

    def __init__(self, *, connect_s: float, engine_key: str, shortage: Shortage) -> None:
        self._connect_s = connect_s
        self._key = engine_key
        self._shortage = shortage
        # No limit of its own: admission bounds what is in flight, and a queue here would be invisible to the brain.
        self._idle: dict[Target, dict[Wire, float]] = {}
        """Since when, the oldest first."""
        self._sweep_at: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Upstream {sum(map(len, self._idle.values()))} idle connections>"

    async def post(self, url: str, body: bytes, *, request_id: str = "") -> Reply:
        """Send ``body`` and wait for the status. Raises ``Lost``, ``Exhausted``."""
        return await self.call(url, body, request_id=request_id).reply()

    def call(self, url: str, body: bytes, *, request_id: str = "") -> Call:
        """The same, to be begun by ``reply`` and called off by ``abandon``."""
        target, head = _head(url, self._key)
        named = f"x-request-id: {request_id}\r\n" if request_id else ""
        return Call(self, url, target, b"".join((head, f"{named}content-length: {len(body)}\r\n\r\n".encode(), body)))

    async def connect(self, target: Target) -> Wire:
        """A new connection. Raises ``OSError``."""
        tls = ssl.create_default_context() if target.is_tls else None
        async with asyncio.timeout(self._connect_s):
            _, wire = await asyncio.get_running_loop().create_connection(Wire, target.host, target.port, ssl=tls)
        return wire

    def exhausted(self, error: OSError) -> Exhausted:
        """Note that a connection failed for want of a descriptor or memory; what is raised then."""
        lacks = f"this router has no file descriptor or memory left to reach a worker ({os.strerror(error.errno or 0)})"
        self._shortage.add(Lack.DESCRIPTORS, f"{lacks}; raise its limit of open files, or have fewer clients")
        return Exhausted(f"{lacks}; retry", RETRY_AFTER_S)

    def take(self, target: Target) -> Wire | None:
        """The idle connection that was used last: those that nobody needs any more grow old."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(target)
        while idle:
            wire, since_s = idle.popitem()
            if wire.reusable and loop.time() - since_s < KEEPALIVE_S:
                return wire
            wire.close()
        return None

    def keep(self, target: Target, wire: Wire) -> None:
        """The answer was read to its end."""
        if not wire.reusable:
            wire.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.setdefault(target, {})[wire] = loop.time()
        if self._sweep_at is None:
            self._sweep_at = loop.call_later(KEEPALIVE_S, self._sweep)

    def _sweep(self) -> None:
        """Close those that grew old. One timer for all: each has a new age with every request."""
        loop, oldest_s = asyncio.get_running_loop(), math.inf
        for target, idle in list(self._idle.items()):
            for wire, since_s in list(idle.items()):  # the oldest come first
                if loop.time() - since_s < KEEPALIVE_S:
                    oldest_s = min(oldest_s, since_s)
                    break
                del idle[wire]
                wire.close()
            if not idle:
                del self._idle[target]
        self._sweep_at = loop.call_at(oldest_s + KEEPALIVE_S, self._sweep) if self._idle else None

    async def close(self) -> None:
        """Close what is idle; replies close their own."""
        if self._sweep_at is not None:
            self._sweep_at.cancel()
        for idle in self._idle.values():
            for wire in idle:
                wire.close()
        self._idle.clear()
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
