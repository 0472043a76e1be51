"""All connections of clients. Whoever says nothing must never keep others out, nor may all clients together take the
descriptors that workers and members need."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kvrelay.channel import MAX_LINKS
from kvrelay.router.shortage import Lack, Shortage

HEAD_S = 30.0
"""Longest time until the head of a request is here: the first one from the connection on, others from their first byte.
Others' are 10 to 60 s."""
KEEPALIVE_S = 75.0
"""How long a connection may wait for its next request; nginx's."""
STALL_S = 300.0
"""How long a client may take nothing of an answer that is written to its end, which holds nothing but its connection.
One that reads 1 KB/s shows no progress for a minute: the systems in between pass on large pieces."""
MAX_CLIENTS = 16_384
SURPLUS = 64
"""Connections beyond the most, each for one request: whoever asks for an answer is told to come again, and ``/health``
is served."""
OTHER_DESCRIPTORS = MAX_LINKS + 64
"""Links of members, listeners and files."""


class Ending(StrEnum):
    """Why the router ended a connection. The words are labels of a metric."""

    SILENT = "silent"
    """The head of a request did not arrive."""
    IDLE = "idle"
    """No request followed the last one."""
    STALLED = "stalled"
    """Its client took nothing of an answer any more."""
    EVICTED = "evicted"
    """It had waited longest, and another one needed its place."""
    REFUSED = "refused"
    """All places were taken by requests."""


class Guest(Protocol):
    """A client, as far as its connection takes a place."""

    @property
    def unsent_bytes(self) -> int:
        """What was written to it and its client's machine has not acknowledged."""

    def hang_up(self, ending: Ending) -> None:
        """End it; ``Clients.left`` follows."""


def most_clients(descriptors: int) -> int:
    """How many of so many ``descriptors`` clients may take: each request needs one more at its worker."""
    return max(1, min(MAX_CLIENTS, (descriptors - min(OTHER_DESCRIPTORS, descriptors // 4)) // 2))


def descriptor_limit() -> int:
    """Of this process, now: operators change it while it runs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CLIENTS * 4 if soft == resource.RLIM_INFINITY else soft


class Clients:
    """Connected clients, and for how long each of them has kept the router waiting."""

    def __init__(
        self, clock: Callable[[], float], shortage: Shortage, descriptors: Callable[[], int] = descriptor_limit
    ) -> None:
        self._clock = clock
        self._shortage = shortage
        self.descriptors = descriptors
        self._open: set[Guest] = set()
        self._heads: dict[Guest, float] = {}
        """Those whose request is awaited, since when; the oldest first."""
        self._kept: dict[Guest, float] = {}
        """Those that had an answer and may ask again, likewise."""
        self._sending: dict[Guest, tuple[float, int | None]] = {}
        """Those whose answer is there and goes out: when they were looked at, and what was unsent then; None before."""
        self._surplus: dict[Guest, None] = {}
        """Those beyond the most, the oldest first."""
        self.endings: Counter[Ending] = Counter()

    def __repr__(self) -> str:
        waiting = len(self._heads) + len(self._kept)
        return f"<Clients {len(self)}/{self.most}, {waiting} idle, {len(self._surplus)} surplus>"

    def __len__(self) -> int:
        return len(self._open)

    @property
    def most(self) -> int:
        return most_clients(self.descriptors())

    def came(self, guest: Guest) -> None:
        """A client has connected: it is let in, in the place of the longest idle one if need be, or hung up on."""
        if len(self._open) - len(self._surplus) >= self.most and not self._made_room(surplus=False):
            if len(self._surplus) >= SURPLUS and not self._made_room(surplus=True):
                self._end(guest, Ending.REFUSED)
                return
            self._surplus[guest] = None
        self._open.add(guest)
        self._heads[guest] = self._clock()

    def is_surplus(self, guest: Guest) -> bool:
        """It is here only to be told that there is no room."""
        return guest in self._surplus

    def speaks(self, guest: Guest) -> None:
        """Bytes came: if it was idle, they are the first of a request's head."""
        if self._kept.pop(guest, None) is not None:
            self._heads[guest] = self._clock()

    def asks(self, guest: Guest) -> None:
        """The head of its request is here."""
        self._heads.pop(guest, None)
        self._kept.pop(guest, None)
        self._sending.pop(guest, None)

    def sends(self, guest: Guest) -> None:
        """The rest of its answer goes out."""
        if guest in self._open:
            self._sending[guest] = (self._clock(), None)

    def answered(self, guest: Guest) -> None:
        """Its request is over."""
        self.asks(guest)
        if guest in self._open:
            self._kept[guest] = self._clock()

    def left(self, guest: Guest) -> None:
        """Its connection is closed, by whomever."""
        self.asks(guest)
        self._open.discard(guest)
        self._surplus.pop(guest, None)

    def tick(self) -> None:
        """Time passed: hang up on those that have been awaited for too long."""
        for waiting, longest_s, ending in (
            (self._heads, HEAD_S, Ending.SILENT),
            (self._kept, KEEPALIVE_S, Ending.IDLE),
        ):
            overdue_s = self._clock() - longest_s
            while waiting and waiting[guest := next(iter(waiting))] <= overdue_s:
                self._end(guest, ending)
        self._look_at_senders()

    def _look_at_senders(self) -> None:
        """Whoever reads slowly may do so; who took nothing since the last look is gone, as far as anybody can tell."""
        while self._sending and self._sending[guest := next(iter(self._sending))][0] <= self._clock() - STALL_S:
            _, before_bytes = self._sending.pop(guest)
            unsent_bytes = guest.unsent_bytes
            if before_bytes and unsent_bytes >= before_bytes:
                self._end(guest, Ending.STALLED)
            else:
                self._sending[guest] = (self._clock(), unsent_bytes)

    def _made_room(self, *, surplus: bool) -> bool:
        """Whether one of those within the most, or beyond, was idle and had to go."""
        oldest = [
            (waiting[guest], guest)
            for waiting in (self._heads, self._kept)
            if (guest := next((each for each in waiting if (each in self._surplus) is surplus), None)) is not None
        ]
        if oldest:
            self._end(min(oldest, key=lambda each: each[0])[1], Ending.EVICTED)
        return bool(oldest)

    def _end(self, guest: Guest, ending: Ending) -> None:
        self.endings[ending] += 1
        if ending in (Ending.EVICTED, Ending.REFUSED):
            done = "refused the next one" if ending is Ending.REFUSED else "closed the longest idle one"
            self._shortage.add(
                Lack.CONNECTIONS,
                f"clients hold all {self.most} connections that {self.descriptors()} open files leave them: {done}; "
                "raise the limit of open files of the router, or have fewer clients",
            )
        self.left(guest)
        guest.hang_up(ending)
