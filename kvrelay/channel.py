"""One authenticated link between two processes: framed messages, raw payloads, file descriptors.

It must never deliver a message before both sides proved the cluster's key. Written on raw sockets
rather than asyncio streams: payloads are received straight into the arena, and unix links pass
file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kvrelay import protocol
from kvrelay.errors import KvrelayError, Lost, Malformed, Refused
from kvrelay.protocol import Challenge, FrameReader, Hello, Message, Proof, Rejected, Welcome

HANDSHAKE_S = 5.0
MAX_LINKS = 1024
_READ_BYTES = 256 << 10
_MAX_FDS = 4
_IOV_MAX = 512

M = TypeVar("M", bound=Message)


class Channel:
    """A connected socket after the handshake. One task may send while another receives."""

    def __init__(self, sock: socket.socket, reader: FrameReader | None = None) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = reader or FrameReader()
        self._send_lock = asyncio.Lock()
        self._fds: list[int] = []
        self.peer = "?"
        """Name that the other side gave in its handshake."""
        self.purpose = "?"

    def __repr__(self) -> str:
        state = "closed" if self._sock.fileno() < 0 else "open"
        return f"<Channel {self.purpose} with {self.peer}, {state}>"

    async def send(self, message: Message, payload: Iterable[memoryview] = ()) -> None:
        """Send one message and its raw payload. Waits while the peer does not read. Raises ``Lost``."""
        views = [memoryview(protocol.encode(message)), *payload]
        async with self._send_lock:
            try:
                await self._send_views(views)
            except OSError as error:
                raise Lost(f"link to {self.peer} broke: {error}") from error

    async def _send_views(self, views: list[memoryview]) -> None:
        while views:
            try:
                sent = self._sock.sendmsg(views[:_IOV_MAX])
            except (BlockingIOError, InterruptedError):
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
                continue
            views = _drop(views, sent)

    async def send_fds(self, message: Message, fds: list[int]) -> None:
        """Send one message with file descriptors (unix sockets only)."""
        data = protocol.encode(message)
        async with self._send_lock:
            try:
                sent = socket.send_fds(self._sock, [data], fds)
                await self._send_views([memoryview(data)[sent:]] if sent < len(data) else [])
            except OSError as error:
                raise Lost(f"link to {self.peer} broke: {error}") from error

    async def recv(self) -> Message:
        """The next message. Raises ``Lost`` when the peer is gone, ``Malformed`` on bytes that are no message."""
        while (message := self._reader.next()) is None:
            self._reader.feed(await self._read())
        return message

    async def recv_into(self, view: memoryview) -> None:
        """Fill ``view`` with payload bytes. Raises ``Lost``."""
        done = self._reader.take(view)
        while done < len(view):
            try:
                count = await self._loop.sock_recv_into(self._sock, view[done:])
            except OSError as error:
                raise Lost(f"link to {self.peer} broke: {error}") from error
            if count == 0:
                raise Lost(f"{self.peer} closed the link in the middle of a payload")
            done += count

    def take_fds(self) -> list[int]:
        """File descriptors received so far; the caller owns them."""
        fds, self._fds = self._fds, []
        return fds

    async def _read(self) -> bytes:
        try:
            if self._sock.family == socket.AF_UNIX:
                data = await self._read_unix()
            else:
                data = await self._loop.sock_recv(self._sock, _READ_BYTES)
        except OSError as error:
            raise Lost(f"link to {self.peer} broke: {error}") from error
        if not data:
            raise Lost(f"{self.peer} closed the link")
        return data

    async def _read_unix(self) -> bytes:
        while True:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
            except (BlockingIOError, InterruptedError):
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            self._fds += fds
            return data

    async def _ready(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        fd = self._sock.fileno()
        if fd < 0:
            raise OSError("the link was closed here")
        waiter: asyncio.Future[None] = self._loop.create_future()
        add(fd, _wake, waiter)
        try:
            await waiter
        finally:
            remove(fd)

    def close(self) -> None:
        """Close the link; safe to call twice."""
        fd = self._sock.fileno()
        if fd >= 0:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
        for unclaimed in self.take_fds():
            os.close(unclaimed)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _drop(views: list[memoryview], sent: int) -> list[memoryview]:
    for position, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[position + 1 :]]
        sent -= len(view)
    return []


# ---------------------------------------------------------------- handshake


async def connect(address: str | Path, key: bytes, *, sender: str, purpose: str) -> Channel:
    """Open a link to ``host:port`` or to a unix socket path. Raises ``Lost``, ``Refused``."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            channel = Channel(await _dial(address))
            try:
                await _introduce(channel, key, sender, purpose)
            except BaseException:
                channel.close()
                raise
            return channel
    except TimeoutError as error:
        raise Lost(f"{address} did not answer within {HANDSHAKE_S:g} s") from error


async def _dial(address: str | Path) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    target = str(address) if isinstance(address, Path) else split_address(address)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
    except OSError as error:
        sock.close()
        raise Lost(f"cannot connect to {address}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def _introduce(channel: Channel, key: bytes, sender: str, purpose: str) -> None:
    hello = Hello(version=protocol.WIRE_VERSION, purpose=purpose, sender=sender, nonce=secrets.token_bytes(16))
    await channel.send(hello)
    challenge = await expect(channel, Challenge)
    protocol.check_proof(key, "server", hello.nonce, challenge.nonce, challenge.proof)
    await channel.send(Proof(proof=protocol.prove(key, "client", hello.nonce, challenge.nonce)))
    welcome = await expect(channel, Welcome)
    channel.peer, channel.purpose = welcome.receiver, purpose


async def welcome(sock: socket.socket, key: bytes, *, receiver: str, purposes: frozenset[str]) -> Channel:
    """Serve the handshake on an accepted socket. Raises ``Lost``, ``Refused``, ``Malformed``."""
    channel = Channel(sock, FrameReader(max_frame_bytes=4096))
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await _admit(channel, key, receiver, purposes)
    except TimeoutError as error:
        channel.close()
        raise Lost("a caller did not finish its handshake") from error
    except Refused as error:
        with contextlib.suppress(Lost):
            await channel.send(Rejected(code="Refused", reason=str(error)))
        channel.close()
        raise
    except BaseException:
        channel.close()
        raise
    return channel


async def _admit(channel: Channel, key: bytes, receiver: str, purposes: frozenset[str]) -> None:
    hello = await expect(channel, Hello)
    if hello.version != protocol.WIRE_VERSION:
        raise Refused(f"wire version {hello.version} is not spoken here; use version {protocol.WIRE_VERSION}")
    if hello.purpose not in purposes:
        raise Refused(f"links for {hello.purpose!r} are not served here")
    nonce = secrets.token_bytes(16)
    await channel.send(Challenge(nonce=nonce, proof=protocol.prove(key, "server", hello.nonce, nonce)))
    proof = await expect(channel, Proof)
    protocol.check_proof(key, "client", hello.nonce, nonce, proof.proof)
    channel.peer, channel.purpose = hello.sender, hello.purpose
    channel._reader = FrameReader()
    await channel.send(Welcome(receiver=receiver))


async def expect(channel: Channel, kind: type[M]) -> M:
    """Receive one message that must be a ``kind``. Raises ``Refused`` on ``Rejected``, ``Malformed`` on another."""
    message = await channel.recv()
    if isinstance(message, Rejected):
        raise Refused(message.reason)
    if not isinstance(message, kind):
        raise Malformed(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


# ---------------------------------------------------------------- listening


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` as a pair. Raises ``Malformed``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise Malformed(f"{address!r} is not host:port")
    return host, int(port)


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A listening unix socket that only this user can open; a stale file of a dead process is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    old_mask = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(old_mask)
    return sock


class Listener:
    """Accepts links on a bound socket and runs ``serve`` for each, after the handshake."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        *,
        receiver: str,
        purposes: Iterable[str],
        serve: Callable[[Channel], Awaitable[None]],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._key = key
        self._receiver = receiver
        self._purposes = frozenset(purposes)
        self._serve = serve
        self._links: set[asyncio.Task[None]] = set()
        self.refused = 0
        """Callers that failed the handshake."""

    def __repr__(self) -> str:
        return f"<Listener {self._receiver}, {len(self._links)} links, {self.refused} refused>"

    async def run(self) -> None:
        """Accept until cancelled; then end every link."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                sock, _address = await loop.sock_accept(self._sock)
                if len(self._links) >= MAX_LINKS:
                    sock.close()
                    continue
                task = asyncio.create_task(self._link(sock))
                self._links.add(task)
                task.add_done_callback(self._links.discard)
        finally:
            self._sock.close()
            for task in list(self._links):
                task.cancel()
            await asyncio.gather(*self._links, return_exceptions=True)

    async def _link(self, sock: socket.socket) -> None:
        try:
            channel = await welcome(sock, self._key, receiver=self._receiver, purposes=self._purposes)
        except KvrelayError:
            self.refused += 1
            return
        try:
            await self._serve(channel)
        except (Lost, Malformed):
            pass  # the peer is gone or talks nonsense: its link ends, and ``serve`` has cleaned up after it
        finally:
            channel.close()
