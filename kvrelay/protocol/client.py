"""A client and its node's store, over a unix socket.

Requests carry an ``id``; the answer carries the same one. Messages without an ``id`` are one-way.
"""

from __future__ import annotations

import msgspec

from kvrelay.protocol.message import Message
from kvrelay.types import PageFormat, PageName, SlotRef, Stage, Transport


class Attach(Message, frozen=True, kw_only=True):
    """Map the arena of ``format``. The answer comes with two file descriptors: the arena's memory and its doorbell."""

    id: int
    owner: str
    """``worker/incarnation``. Slots, leases and transfers belong to the link, and are reclaimed with it."""
    format: PageFormat


class Attached(Message, frozen=True, kw_only=True):
    id: int
    epoch: int
    slots: int
    store: str
    advertised: str
    """Address at which other stores reach this one."""


class Allocate(Message, frozen=True, kw_only=True):
    """Ask for up to ``count`` empty slots to write into; fewer may come back (the arena is full of pinned pages)."""

    id: int
    count: int


class Granted(Message, frozen=True, kw_only=True):
    id: int
    slots: list[SlotRef]


class NewPage(msgspec.Struct, frozen=True, array_like=True):
    """A page that its writer starts to fill."""

    name: PageName
    slot: SlotRef
    tokens: int
    """Valid tokens; fewer than ``page_tokens`` for the partial last page of a prompt."""
    parent: PageName | None = None
    """The page before it in its chain, when the writer knows: parents are evicted after their children."""
    shards: int = 1
    """How many writers fill it, each its share of the KV heads: the ranks of a tensor-parallel engine."""


class Announce(Message, frozen=True, kw_only=True):
    """Granted slots are being filled as these pages. With ``transfer`` they are also pages of that transfer."""

    pages: list[NewPage]
    transfer: str | None = None


class OpenTransfer(Message, frozen=True, kw_only=True):
    """P starts a request whose KV goes to the node behind ``push_to`` (None: D shares this store).

    ``names`` are the pages of the whole prompt in order. Those already here and missing there are pushed at once;
    the others when ``Announce`` brings them.
    """

    transfer: str
    names: list[PageName]
    total_tokens: int
    push_to: str | None
    final: bool = False
    """Nothing will be announced for it any more: pages that are not here now do not travel."""


class Milestone(Message, frozen=True, kw_only=True):
    """Something happened to a transfer; the store acts on it and passes it on to its routers."""

    transfer: str
    stage: Stage
    reason: str = ""
    tokens: int = 0


class Acquire(Message, frozen=True, kw_only=True):
    """Pin the pages among ``names`` that are here or arriving, for ``ttl_s`` seconds, under ``lease``.

    ``transfers``: transfers that may still bring missing ones.
    """

    id: int
    lease: str
    names: list[PageName]
    ttl_s: float
    transfers: list[str] = []


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A pinned page: its slot, its valid tokens, and whether all its layers are in (else they are arriving)."""

    slot: SlotRef
    tokens: int
    complete: bool
    shards: int = 1


class Acquired(Message, frozen=True, kw_only=True):
    """Answer to ``Acquire``: one entry per name, None for a miss.

    ``waiting``: at least one missing page is expected from a named transfer that is alive or not yet known here.
    """

    id: int
    pages: list[Held | None]
    waiting: bool


class Release(Message, frozen=True, kw_only=True):
    lease: str


class Suspect(Message, frozen=True, kw_only=True):
    """A reader found bytes of these slots that do not match their checksums: the store looks and forgets such pages.

    Or their owner will never fill them: the store frees them soon. What another owner is filling stays.
    """

    slots: list[SlotRef]


class Exists(Message, frozen=True, kw_only=True):
    id: int
    names: list[PageName]


class Existing(Message, frozen=True, kw_only=True):
    """One flag per name: the page is complete here."""

    id: int
    present: list[bool]


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """One way from a store to a peer store, as its test found it."""

    peer: str
    """Address of the peer."""
    transport: Transport
    rank: int = 0
    """1: taken; 2, 3, ...: taken when those before fail; 0: not used, for the reason in ``problem``."""
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    problem: str = ""


class Describe(Message, frozen=True, kw_only=True):
    id: int


class Described(Message, frozen=True, kw_only=True):
    id: int
    counts: dict[str, int]
    """Monotonic counters and gauges, by name with unit, e.g. ``pages_used``, ``bytes_pushed``."""
    links: list[LinkReport] = []


class Report(Message, frozen=True, kw_only=True):
    """Counter increments of a worker, merged into its store's ``Described.counts``, e.g. ``load_bad_checksum``."""

    counts: dict[str, int]


ClientMessage = (
    Attach | Attached | Allocate | Granted | Announce | OpenTransfer | Milestone
    | Acquire | Acquired | Release | Suspect | Exists | Existing | Describe | Described | Report
)  # fmt: skip
