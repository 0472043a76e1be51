"""Failures, named by what the caller can do next. Mapped once at each border, never by message text."""

from __future__ import annotations

import errno
from collections.abc import Callable


class KvrelayError(Exception):
    """Base of every failure that kvrelay raises on purpose. The message says what to do next."""


class Retry(KvrelayError):
    """Nothing is wrong with the request; the same call may succeed after ``after_s`` seconds."""

    def __init__(self, message: str, after_s: float = 1.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class Overloaded(Retry):
    """There is no room now: no slot, no worker, no budget."""


EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Numbers of an ``OSError`` by which this process or machine has no descriptor or memory left, whoever it turned to."""


class Exhausted(Retry):
    """This process itself has no descriptor or memory left: nobody else is to blame."""


class Lost(KvrelayError):
    """The peer, page or process is gone; recompute or choose another."""


class Unasked(Lost):
    """It never had what was asked of it, or turned it away: whatever happened to it, this was not the reason."""


class Failing(Lost):
    """It answered that it failed: its engine may have died of what was asked, or it fails at everything."""


class Harmful(KvrelayError):
    """Workers fail at this very request, one after the other: no other one is to have it."""


class Incompatible(KvrelayError):
    """Two sides cannot exchange KV; ``field`` names what differs."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: {ours!r} here, {theirs!r} there")
        self.field = field


class Refused(KvrelayError):
    """The peer understood and said no (bad key, wrong version, foreign address)."""


class Barred(Refused):
    """The other side is at an address that this one was not told of: whatever it is asked for, it cannot reach it."""


class Malformed(KvrelayError):
    """Bytes that are not what the protocol allows: too long, unknown, out of range."""


_ANSWERS: dict[str, Callable[[str], KvrelayError]] = {
    "Overloaded": Overloaded,
    "Lost": Lost,
    "Refused": Refused,
    "Malformed": Malformed,
}
"""What one side may answer to another, by the name that travels."""


def answered(code: str, reason: str) -> KvrelayError:
    """The error that the other side raised; a code that nobody knows here is a plain no."""
    return _ANSWERS.get(code, Refused)(reason)


class BadRequest(KvrelayError):
    """The client's request is wrong; ``status`` and ``param`` go into the OpenAI error body."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Misconfigured(KvrelayError):
    """A setting cannot work here; the message names it and says what would."""
