"""Questions that the calling thread itself asks a store, of this node or another, and whose answers it waits for.

For scripts; a forward pass must not ask. Where a thread of its own keeps the link, as a client's does, four wake-ups
lie between a question and its answer; here there are two, the store's and the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from kvrelay.channel import expected, introduction, split_address
from kvrelay.errors import Lost, Malformed
from kvrelay.protocol.client import Describe, Described, Existing, Exists
from kvrelay.protocol.frame import FrameReader, encode
from kvrelay.protocol.message import Message
from kvrelay.store.bulk import ANSWER_S
from kvrelay.types import PageName

_READ_BYTES = 64 << 10

A = TypeVar("A", Existing, Described)


class _Link:
    """A connected socket that blocks, for one question after another, until ``deadline`` of the monotonic clock each.

    It serves the process that made it: in a fork the answers of both would come over one stream. After an error it must
    be closed, because the answer that it still owes would be read as another question's.
    """

    def __init__(self, address: str | Path) -> None:
        self._family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
        self._target = str(address) if isinstance(address, Path) else split_address(address)
        self._sock = socket.socket(self._family, socket.SOCK_STREAM)
        self._reader = FrameReader()
        self._process = os.getpid()
        self.is_shut = False

    def __repr__(self) -> str:
        return f"<_Link to {self._target}, {'shut' if self.is_shut else 'open'}>"

    @property
    def is_usable(self) -> bool:
        return not self.is_shut and self._process == os.getpid()

    def open(self, key: bytes, sender: str, deadline: float) -> None:
        """Connect, and prove the key. Raises what ``exchange`` does, ``Refused``, ``UnicodeError``."""
        self._sock.settimeout(_left_s(deadline))
        self._sock.connect(self._target)
        if self._family == socket.AF_INET:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        steps = introduction(key, sender, "inquiry")
        with contextlib.suppress(StopIteration):
            said = next(steps)
            while True:
                said = steps.send(self.exchange(said, deadline))

    def exchange(self, message: Message, deadline: float) -> Message:
        """Send ``message``; the next one that comes. Raises OSError, ``EOFError``, ``Malformed``."""
        if self.is_shut:
            raise EOFError("the link was closed here")
        self._sock.settimeout(_left_s(deadline))
        self._sock.sendall(encode(message))
        while (answer := self._reader.next()) is None:
            self._sock.settimeout(_left_s(deadline))
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise EOFError("the link was closed here" if self.is_shut else "the link was closed at its other end")
            self._reader.feed(data)
        return answer

    def shut(self) -> None:
        """Wake whoever waits for an answer, from any thread: none will come. Leaves another process's link alone."""
        self.is_shut = True
        if self._process == os.getpid():
            with contextlib.suppress(OSError):  # not connected yet, or not any more
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class Inquiry:
    """A link to the store at ``host:port``, or at the path of a unix socket; made when first needed, and again when it
    broke. Safe from any thread: they take turns. A process that is forked off makes a link of its own."""

    def __init__(self, address: str | Path, key: bytes, *, sender: str) -> None:
        self._address = address
        self._key = key
        self._sender = sender
        self._link: _Link | None = None
        self._ids = itertools.count(1)
        self._turns: dict[int, threading.Lock] = {}
        """Locks of askers, by process: a fork must not wait for a thread that it has not."""

    def __repr__(self) -> str:
        return f"<Inquiry at {self._address}, {'idle' if self._link is None else 'linked'}>"

    def __enter__(self) -> Inquiry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exists(self, names: Sequence[PageName]) -> list[bool]:
        """Which pages are complete there. Raises ``Lost``, ``Refused``, ``Malformed``."""
        return self._ask(Exists(id=next(self._ids), names=list(names)), Existing).present

    def describe(self) -> dict[str, int]:
        """The store's counters. Raises ``Lost``, ``Refused``, ``Malformed``."""
        return self._ask(Describe(id=next(self._ids)), Described).counts

    def close(self) -> None:
        """End the link without waiting; a question that is under way is ``Lost``, a later one makes a new link."""
        link, turn = self._link, self._turn
        if link is not None:
            link.shut()
        if turn.acquire(blocking=False):
            try:
                self._drop()
            finally:
                turn.release()

    @property
    def _turn(self) -> threading.Lock:
        return self._turns.setdefault(os.getpid(), threading.Lock())

    def _ask(self, question: Exists | Describe, kind: type[A]) -> A:
        deadline, turn = time.monotonic() + ANSWER_S, self._turn
        if not turn.acquire(timeout=ANSWER_S):
            raise Lost(f"the store at {self._address} did not answer other questions within {ANSWER_S:g} s")
        try:
            return self._answer(question, kind, deadline)
        except TimeoutError as error:
            raise Lost(f"the store at {self._address} did not answer within {ANSWER_S:g} s") from error
        except (OSError, EOFError) as error:
            raise Lost(f"no store at {self._address}: {error}") from error
        except UnicodeError as error:  # the resolver's, for labels that are empty or too long
            raise Lost(f"no store at {self._address}: that is no host name") from error
        finally:
            turn.release()

    def _answer(self, question: Exists | Describe, kind: type[A], deadline: float) -> A:
        try:
            answer = expected(self._exchange(question, deadline), kind)
            self._check(question, answer)
        except BaseException:  # an interrupt too: what the link still owes must not be read as another's answer
            self._drop()
            raise
        return answer

    def _exchange(self, question: Message, deadline: float) -> Message:
        if self._link is not None and not self._link.is_usable:
            self._drop()
        if self._link is not None:
            try:
                return self._link.exchange(question, deadline)
            except (ConnectionError, EOFError):  # the store was restarted since; to ask twice changes nothing
                if self._link.is_shut:
                    raise
                self._drop()
        self._link = _Link(self._address)
        self._link.open(self._key, self._sender, deadline)
        return self._link.exchange(question, deadline)

    def _check(self, question: Exists | Describe, answer: Existing | Described) -> None:
        if answer.id != question.id:
            raise Malformed(f"the store at {self._address} answered question {answer.id}, not {question.id}")
        if isinstance(question, Exists) and isinstance(answer, Existing):
            asked, told = len(question.names), len(answer.present)
            if told != asked:
                raise Malformed(f"the store at {self._address} answered {told} times to {asked} names")

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
