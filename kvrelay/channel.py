"""Authenticated links: dialling, the handshake, listening.

It must never hand out a link before both sides proved the cluster's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from pathlib import Path
from typing import TypeVar

from kvrelay.errors import EXHAUSTED, KvrelayError, Lost, Malformed, Refused, answered
from kvrelay.link import Channel as Channel
from kvrelay.protocol.frame import WIRE_VERSION, FrameReader
from kvrelay.protocol.handshake import Challenge, Hello, Proof, Rejected, Welcome, check_proof, prove
from kvrelay.protocol.message import Message

_log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
ACCEPT_RETRY_S = 0.1
"""Pause when no descriptor or memory is left for another link."""
MAX_LINKS = 1024
MAX_CRASHES = 3
CRASH_WINDOW_S = 60.0
_PASSING = EXHAUSTED | {errno.ECONNABORTED}
_MAX_INTRODUCTION_BYTES = 1024
"""Longest message of somebody who has not proved the key: a hello is about a hundred bytes, and a name."""

M = TypeVar("M", bound=Message)


# ---------------------------------------------------------------- handshake


@contextlib.asynccontextmanager
async def in_time(who: object) -> AsyncIterator[None]:
    """Give ``who`` the time of a handshake to answer. Raises ``Lost``."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            yield
    except TimeoutError as error:
        raise Lost(f"{who} did not answer within {HANDSHAKE_S:g} s") from error


async def connect(address: str | Path, key: bytes, *, sender: str, purpose: str) -> Channel:
    """Open a link to ``host:port`` or to a unix socket path. Raises ``Lost``, ``Refused``."""
    async with in_time(address):
        channel = Channel(await _dial(address), FrameReader(_MAX_INTRODUCTION_BYTES))
        try:
            await _introduce(channel, key, sender, purpose)
        except Malformed as error:
            channel.close()
            raise Malformed(f"{address}: {error}") from error
        except BaseException:
            channel.close()
            raise
        return channel


async def _dial(address: str | Path) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    target = str(address) if isinstance(address, Path) else split_address(address)
    try:
        await asyncio.get_running_loop().sock_connect(sock, target)
        sock.getpeername()  # asyncio takes a unix socket with too many callers waiting for one that it has reached
    except OSError as error:
        sock.close()
        raise Lost(f"cannot connect to {address}: {_reason(error)}") from error
    except UnicodeError as error:  # the resolver's, for labels that are empty or too long
        sock.close()
        raise Lost(f"cannot connect to {address}: that is no host name") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _reason(error: OSError) -> str:
    """In the system's words: asyncio's repeat the address, and say nothing else. Those of a resolver have no number
    of the system's."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def introduction(key: bytes, sender: str, purpose: str) -> Generator[Message, Message, str]:
    """The caller's part of the handshake: it yields what is to be said, takes what is answered, returns who answers.

    Raises ``Refused``, ``Malformed``.
    """
    hello = Hello(version=WIRE_VERSION, purpose=purpose, sender=sender, nonce=secrets.token_bytes(16))
    challenge = expected((yield hello), Challenge)
    check_proof(key, "server", hello.nonce, challenge.nonce, challenge.proof)
    return expected((yield Proof(proof=prove(key, "client", hello.nonce, challenge.nonce))), Welcome).receiver


async def _introduce(channel: Channel, key: bytes, sender: str, purpose: str) -> None:
    steps = introduction(key, sender, purpose)
    try:
        said = next(steps)
        while True:
            await channel.send(said)
            said = steps.send(await channel.recv())
    except StopIteration as end:
        channel.peer, channel.purpose = end.value, purpose
        channel.lift_limit()


async def welcome(sock: socket.socket, key: bytes, *, receiver: str, purposes: frozenset[str]) -> Channel:
    """Serve the handshake on an accepted socket. Raises ``Lost``, ``Refused``, ``Malformed``."""
    channel = Channel(sock, FrameReader(_MAX_INTRODUCTION_BYTES))
    try:
        async with in_time("a caller"):
            await _admit(channel, key, receiver, purposes)
    except Refused as error:
        with contextlib.suppress(Lost):
            await channel.send(Rejected(code=type(error).__name__, reason=str(error)))
        channel.close()
        raise
    except BaseException:
        channel.close()
        raise
    return channel


async def _admit(channel: Channel, key: bytes, receiver: str, purposes: frozenset[str]) -> None:
    hello = await expect(channel, Hello)
    if hello.version != WIRE_VERSION:
        raise Refused(f"wire version {hello.version} is not spoken here; use version {WIRE_VERSION}")
    if hello.purpose not in purposes:
        raise Refused(f"links for {hello.purpose!r} are not served here")
    nonce = secrets.token_bytes(16)
    await channel.send(Challenge(nonce=nonce, proof=prove(key, "server", hello.nonce, nonce)))
    proof = await expect(channel, Proof)
    check_proof(key, "client", hello.nonce, nonce, proof.proof)
    channel.peer, channel.purpose = hello.sender, hello.purpose
    channel.lift_limit()
    await channel.send(Welcome(receiver=receiver))


async def expect(channel: Channel, kind: type[M]) -> M:
    """Receive one message that must be a ``kind``. Raises what ``Rejected`` says, ``Malformed`` on another."""
    return expected(await channel.recv(), kind)


def expected(message: Message, kind: type[M]) -> M:
    """``message``, if it is a ``kind``. Raises what ``Rejected`` says, ``Malformed`` on another."""
    if isinstance(message, Rejected):
        raise answered(message.code, message.reason)
    if not isinstance(message, kind):
        raise Malformed(f"expected {kind.__name__}, got {type(message).__name__}")
    return message


# ---------------------------------------------------------------- listening


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` as a pair. Raises ``Malformed``."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise Malformed(f"{address!r} is not host:port")
    return host, int(port)


def is_everywhere(host: str) -> bool:
    """Whether a listener on ``host`` listens on every address of this machine."""
    return host in ("", "0.0.0.0")


def reachable(host: str) -> str:
    """An address at which this machine reaches a listener on ``host``."""
    return "127.0.0.1" if is_everywhere(host) else host


def bind_tcp(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError.

    ``shared``: other processes of this user may listen there too, if they say so as well, and the kernel gives each new
    connection to one of those that do. So it does not listen yet: who is not ready to serve gets none.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
        if not shared:
            sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A listening unix socket that only this user can open; a stale file of a dead process is replaced.

    Raises OSError, EADDRINUSE when a live process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _remove_stale(path)
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


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another process listens here", str(path))


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
        """Callers that failed the handshake, and links that ended because what came on them is no message."""
        self.crashed = 0
        """Links that ended by an error in our own code; health must show it."""
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)

    def __repr__(self) -> str:
        return f"<Listener {self._receiver}, {len(self._links)} links, {self.refused} refused, {self.crashed} crashed>"

    @property
    def is_sound(self) -> bool:
        """False while links crash again and again: ``MAX_CRASHES`` of them within ``CRASH_WINDOW_S``."""
        oldest = self._crashes[0] if len(self._crashes) == MAX_CRASHES else -CRASH_WINDOW_S
        return asyncio.get_running_loop().time() - oldest >= CRASH_WINDOW_S

    async def run(self) -> None:
        """Accept until cancelled; then end every link."""
        try:
            while True:
                sock = await self._accept()
                if len(self._links) >= MAX_LINKS:
                    sock.close()
                    continue
                task = asyncio.create_task(self._link(sock))
                self._links.add(task)
                task.add_done_callback(self._ended)
        finally:
            self._sock.close()
            for task in list(self._links):
                task.cancel()
            await asyncio.gather(*self._links, return_exceptions=True)

    async def _accept(self) -> socket.socket:
        while True:
            try:
                return (await asyncio.get_running_loop().sock_accept(self._sock))[0]
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                await asyncio.sleep(ACCEPT_RETRY_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._links.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.crashed += 1
            self._crashes.append(task.get_loop().time())
            _log.error("a link of %s crashed", self._receiver, exc_info=error)

    async def _link(self, sock: socket.socket) -> None:
        try:
            channel = await welcome(sock, self._key, receiver=self._receiver, purposes=self._purposes)
        except KvrelayError:
            self.refused += 1
            return
        except Exception:  # noqa: BLE001  # border: nobody without the key may spoil our health, by any error
            self.refused += 1
            _log.exception("a caller of %s was refused by an error", self._receiver)
            return
        try:
            await self._serve(channel)
        except Malformed:
            self.refused += 1
        except KvrelayError:
            pass  # the peer is gone or says no: its link ends, and ``serve`` has cleaned up after it
        finally:
            channel.close()
