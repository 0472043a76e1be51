"""A connected socket that carries framed messages, raw payloads and file descriptors.

Written on raw sockets rather than asyncio streams: payloads are received straight into the arena, and unix links pass
file descriptors. It must never let a message follow one that was cut off half-way.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import termios
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from kvrelay.errors import Lost, Malformed
from kvrelay.protocol.frame import MAX_FRAME_BYTES, FrameReader, encode
from kvrelay.protocol.message import Message

_READ_BYTES = 64 << 10
"""Little more than a message: what is read here of a payload is copied twice."""
_MAX_FDS = 4
_IOV_MAX = 512

T = TypeVar("T")


class Channel:
    """A connected socket after the handshake. One task may send while another receives."""

    def __init__(self, sock: socket.socket, reader: FrameReader | None = None) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _tune(sock)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = reader or FrameReader()
        self._send_lock = asyncio.Lock()
        self._waiters: set[asyncio.Future[None]] = set()
        self._reading: asyncio.Future[None] | None = None
        self._is_watched = False
        """The loop says when there are bytes to read."""
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done once the link is closed here."""
        self._fds: list[int] = []
        self._sent_bytes = 0
        self.peer = "?"
        """Name that the other side gave in its handshake."""
        self.purpose = "?"

    def __repr__(self) -> str:
        state = "closed" if self._sock.fileno() < 0 else "open"
        return f"<Channel {self.purpose} with {self.peer}, {state}>"

    async def send(self, message: Message, payload: Iterable[memoryview] = (), *, stall_s: float | None = None) -> None:
        """Send one message and its raw payload. Waits while the peer does not read. Raises ``Lost``.

        ``stall_s``: longest time in which not a single byte moves; the link is closed after it.
        """
        views = [memoryview(encode(message)), *payload]
        async with self._send_lock:
            with self._closing_on_error():
                await self._send_views(views, stall_s)

    async def _send_views(self, views: list[memoryview], stall_s: float | None) -> None:
        first = 0
        while first < len(views):
            try:
                sent = self._sock.sendmsg(views[first : first + _IOV_MAX])
            except (BlockingIOError, InterruptedError):
                await self._writable(stall_s)
                continue
            self._sent_bytes += sent
            first = _advance(views, first, sent)

    async def send_fds(self, message: Message, fds: list[int]) -> None:
        """Send one message with file descriptors (unix sockets only). Raises ``Lost``."""
        data = encode(message)
        async with self._send_lock:
            with self._closing_on_error():
                sent = await self._send_first(data, fds)
                await self._send_views([memoryview(data)[sent:]] if sent < len(data) else [], None)

    async def _send_first(self, data: bytes, fds: list[int]) -> int:
        while True:
            try:
                return socket.send_fds(self._sock, [data], fds)
            except (BlockingIOError, InterruptedError):
                await self._writable(None)

    async def recv(self) -> Message:
        """The next message. Raises ``Lost`` when the peer is gone, ``Malformed`` on bytes that are no message."""
        while (message := self._reader.next()) is None:
            self._reader.feed(await self._read())
        return message

    async def recv_into(self, views: list[memoryview], *, stall_s: float | None = None) -> None:
        """Fill ``views``, in order, with payload bytes. Raises ``Lost``, also after ``stall_s`` without a byte."""
        views = [view for view in views if len(view)]
        first = 0
        while first < len(views) and (count := self._reader.take(views[first])):
            first = _advance(views, first, count)
        while first < len(views):
            rest = views[first : first + _IOV_MAX]
            count = await self._receive(partial(self._read_views, rest), stall_s)
            if count == 0:
                raise Lost(f"{self.peer} closed the link in the middle of a payload")
            first = _advance(views, first, count)

    @property
    def delivered_bytes(self) -> int:
        """Bytes sent here that the other machine has taken; whether its process has read them is another matter."""
        return self._sent_bytes - self.queued_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes sent here that the other machine has not taken yet."""
        queued = array("i", [0])
        with contextlib.suppress(OSError, ValueError):
            fcntl.ioctl(self._sock, termios.TIOCOUTQ, queued)
        return queued[0]

    def lift_limit(self) -> None:
        """Accept messages of the full length from now on: the peer is known."""
        self._reader.max_frame_bytes = MAX_FRAME_BYTES

    def give_up_after(self, unheard_s: float) -> None:
        """End the link once the other machine has acknowledged nothing that was sent for so long, where the system can
        be told so. Its own limit is a quarter of an hour, with a minute and more between two tries."""
        if self._sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            with contextlib.suppress(OSError):  # it is broken already
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(unheard_s * 1000))

    def take_fds(self) -> list[int]:
        """File descriptors received so far; the caller owns them."""
        fds, self._fds = self._fds, []
        return fds

    async def _read(self) -> bytes:
        read = self._read_unix if self._sock.family == socket.AF_UNIX else self._read_tcp
        data = await self._receive(read, None)
        if len(self._fds) > _MAX_FDS:
            raise Malformed(f"{self.peer} sends file descriptors that nobody asked for")
        if not data:
            raise Lost(f"{self.peer} closed the link")
        return data

    def _read_tcp(self) -> bytes:
        return self._sock.recv(_READ_BYTES)

    def _read_views(self, views: list[memoryview]) -> int:
        return self._sock.recvmsg_into(views)[0]

    def _read_unix(self) -> bytes:
        # Not socket.recv_fds: it drops its flags argument, and descriptors would leak into child processes.
        room = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
        data, extras, _flags, _address = self._sock.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, packed in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
                self._fds += fds
        return data

    async def _receive(self, read: Callable[[], T], stall_s: float | None) -> T:
        while True:
            try:
                return read()
            except (BlockingIOError, InterruptedError):
                await self._readable(stall_s)
            except OSError as error:
                raise Lost(f"link to {self.peer} broke: {error}") from error

    async def _readable(self, stall_s: float | None) -> None:
        """Wait until there are bytes. The loop goes on watching for the next time: to tell it costs as much as to read
        a message, twice."""
        with self._waiting() as (fd, waiter):
            self._reading = waiter
            if not self._is_watched:
                self._is_watched = True
                self._loop.add_reader(fd, self._has_bytes)
            await self._moved(waiter, stall_s)

    def _has_bytes(self) -> None:
        waiter, self._reading = self._reading, None
        if waiter is not None:
            _wake(waiter)
        else:  # who reads is busy: it finds them by itself
            self._is_watched = False
            self._loop.remove_reader(self._sock.fileno())

    async def _writable(self, stall_s: float | None) -> None:
        """Wait until there is room for bytes."""
        with self._waiting() as (fd, waiter):
            self._loop.add_writer(fd, _wake, waiter)
            try:
                await self._moved(waiter, stall_s)
            finally:
                if self._sock.fileno() == fd:  # a closed one's number may belong to another link by now
                    self._loop.remove_writer(fd)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[tuple[int, asyncio.Future[None]]]:
        """The socket's number, and what ``close`` wakes."""
        fd = self._sock.fileno()
        if fd < 0:
            raise Lost(f"the link to {self.peer} was closed here")
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            yield fd, waiter
        finally:
            self._waiters.discard(waiter)

    async def _moved(self, waiter: asyncio.Future[None], stall_s: float | None) -> None:
        """Raises ``Lost`` after ``stall_s`` in which the socket could move no byte."""
        if stall_s is None:
            await waiter
            return
        try:
            async with asyncio.timeout(stall_s):
                await waiter
        except TimeoutError as error:
            raise Lost(f"{self.peer} moved nothing for {stall_s:g} s") from error

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """A message that was cut off half-way, by an error or a cancellation, ends the link: nothing may follow it."""
        try:
            yield
        except OSError as error:
            self.close()
            raise Lost(f"link to {self.peer} broke: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the link and wake whoever waits on it with ``Lost``; safe to call twice."""
        if not self.over.done():
            self.over.set_result(None)
        fd = self._sock.fileno()
        if fd >= 0:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(Lost(f"the link to {self.peer} was closed here"))
        for unclaimed in self.take_fds():
            os.close(unclaimed)


def _tune(sock: socket.socket) -> None:
    """Send at once, and notice within about 15 s that an idle peer's machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _advance(views: list[memoryview], first: int, moved: int) -> int:
    """Step over ``moved`` bytes; the index of the first view that is not done, itself cut to its rest."""
    while first < len(views) and moved >= len(views[first]):
        moved -= len(views[first])
        first += 1
    if moved:
        views[first] = views[first][moved:]
    return first
