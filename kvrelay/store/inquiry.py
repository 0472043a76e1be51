"""Questions that the calling thread itself asks a store, of this node or another, and whose answers it waits for.

For scripts; a forward pass must not ask. Where a thread of its own keeps the link, as a client's does, four wake-ups
lie between a question and its answer; here there are two, the store's and the caller's.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from kvrelay.channel import expected, introduction, split_address
from kvrelay.errors import KvrelayError, Lost, Malformed
from kvrelay.protocol.client import Describe, Described, Existing, Exists
from kvrelay.protocol.frame import FrameReader, encode
from kvrelay.protocol.message import Message
from kvrelay.store.bulk import ANSWER_S
from kvrelay.types import PageName

_READ_BYTES = 64 << 10

M = TypeVar("M", bound=Message)


class _Link:
    """A connected socket that blocks; what it owes after an error is never read."""

    def __init__(self, address: str | Path, key: bytes, sender: str) -> None:
        family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._reader = FrameReader()
        try:
            self._sock.settimeout(ANSWER_S)
            self._sock.connect(str(address) if isinstance(address, Path) else split_address(address))
            if family == socket.AF_INET:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._introduce(key, sender)
        except BaseException:
            self.close()
            raise

    def _introduce(self, key: bytes, sender: str) -> None:
        steps = introduction(key, sender, "inquiry")
        with contextlib.suppress(StopIteration):
            said = next(steps)
            while True:
                said = steps.send(self.exchange(said))

    def exchange(self, message: Message) -> Message:
        """Send ``message``; the next one that comes. Raises OSError, ``EOFError``, ``Malformed``."""
        self._sock.sendall(encode(message))
        while (answer := self._reader.next()) is None:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise EOFError("the link was closed at its other end")
            self._reader.feed(data)
        return answer

    def close(self) -> None:
        self._sock.close()


class Inquiry:
    """A link to the store at ``host:port``, or at the path of a unix socket; made when first needed, and again when it
    broke. Safe from any thread: they take turns."""

    def __init__(self, address: str | Path, key: bytes, *, sender: str) -> None:
        self._address = address
        self._key = key
        self._sender = sender
        self._link: _Link | None = None
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"<Inquiry at {self._address}, {'idle' if self._link is None else 'linked'}>"

    def __enter__(self) -> Inquiry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exists(self, names: Sequence[PageName]) -> list[bool]:
        """Which pages are complete there. Raises ``Lost``, ``Refused``, ``Malformed``."""
        present = self._ask(Exists(id=0, names=list(names)), Existing).present
        if len(present) != len(names):
            raise Malformed(f"the store at {self._address} answered {len(present)} times to {len(names)} names")
        return present

    def describe(self) -> dict[str, int]:
        """The store's counters. Raises ``Lost``, ``Refused``, ``Malformed``."""
        return self._ask(Describe(id=0), Described).counts

    def close(self) -> None:
        """End the link; a later question makes a new one."""
        with self._turn:
            self._drop()

    def _ask(self, question: Message, kind: type[M]) -> M:
        with self._turn:
            try:
                return expected(self._exchange(question), kind)
            except TimeoutError as error:
                self._drop()
                raise Lost(f"the store at {self._address} did not answer within {ANSWER_S:g} s") from error
            except (OSError, EOFError) as error:
                self._drop()
                raise Lost(f"no store at {self._address}: {error}") from error
            except UnicodeError as error:  # the resolver's, for labels that are empty or too long
                raise Lost(f"no store at {self._address}: that is no host name") from error
            except KvrelayError:
                self._drop()
                raise

    def _exchange(self, question: Message) -> Message:
        if self._link is not None:
            try:
                return self._link.exchange(question)
            except (ConnectionError, EOFError):  # the store was restarted since; to ask twice changes nothing
                self._drop()
        self._link = _Link(self._address, self._key, self._sender)
        return self._link.exchange(question)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
