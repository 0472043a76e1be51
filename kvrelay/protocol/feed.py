"""Workers and stores to routers, over TCP: who is alive, which pages are where, how transfers go."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrelay.protocol.client import LinkReport
from kvrelay.protocol.message import Message
from kvrelay.types import Drain, Medium, PageFormat, PageName, Stage, StoreInfo, Transport, WorkerInfo


class RegisterWorker(Message, frozen=True, kw_only=True):
    """Sent first over every link, and again whenever it has changed."""

    worker: WorkerInfo
    drain: Drain = Drain()
    """What the worker was last told: a router that was started again, or did not tell it, learns it so."""


class RegisterStore(Message, frozen=True, kw_only=True):
    store: StoreInfo


class SetDrain(Message, frozen=True, kw_only=True):
    """A router tells a worker whether it drains. The worker keeps the order with the highest number, and tells all."""

    drain: Drain


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every ``heartbeat_s``. Not ``healthy``: the engine does not answer, and the router sends it no work."""

    name: str
    incarnation: str
    healthy: bool
    counts: dict[str, int] = {}
    links: list[LinkReport] = []
    """A store's ways to its peers."""
    progress: int | None = None
    """Another number each time while the engine has work and does it; None: the sender cannot tell."""


class Neighbours(Message, frozen=True, kw_only=True):
    """A router tells a store where the others are: it tests its paths to them before they are needed."""

    addresses: list[str]


class PushOrder(Message, frozen=True, kw_only=True):
    """A router has a store push pages to another one, those that it has. Its end is told as that of any transfer."""

    transfer: str
    names: list[PageName]
    """Pages of a prompt, from its first one on, all full."""
    total_tokens: int
    format: PageFormat
    push_to: str


class Leaving(Message, frozen=True, kw_only=True):
    """A clean goodbye: the sender will not answer from now on."""

    name: str
    incarnation: str


class TransferEvent(Message, frozen=True, kw_only=True):
    """A store relays a transfer's milestone."""

    store: str
    transfer: str
    stage: Stage
    reason: str = ""
    tokens: int = 0
    """Tokens of the prompt (STARTED), tokens served from KV (LOADED)."""
    transport: Transport = Transport.LOCAL
    """What the bytes came by (ARRIVED)."""
    bytes: int = 0
    """Bytes that crossed the wire (ARRIVED)."""
    pages: int = 0
    """Pages that crossed the wire (ARRIVED)."""
    runs: int = 0
    """Pieces of memory without a gap into which they were received (ARRIVED)."""
    seconds: float = 0.0
    """From the first byte in to the last page complete; most of it may be P's compute (ARRIVED)."""
    moving_s: float = 0.0
    """Seconds with bytes on their way to the peer, until it said that it has them, verified (SENT)."""
    late_bytes: int = 0
    """Bytes that D's node still lacked when P had computed the last layer of the prompt's last page (SENT)."""
    retries: int = 0
    """How often a store began the transfer again, by another link or transport (SENT)."""
    unreachable: bool = False
    """The other store could not be reached, or its link broke: the way there is at fault (FAILED)."""


class PagesWanted(Message, frozen=True, kw_only=True):
    """A router asks for the page events after number ``after``; -1, or when they are kept no more: for a snapshot."""

    after: int


Names = list[Annotated[PageName, msgspec.Meta(min_length=16, max_length=16)]]


class PageChange(msgspec.Struct, frozen=True, array_like=True):
    """Pages that a medium does not have any more, and pages that it has now."""

    medium: Medium
    removed: Names
    stored: Names


class PageEvents(Message, frozen=True, kw_only=True):
    """What changed since event ``sequence - 1``, many pages at once. Names only: no token leaves its node."""

    incarnation: str
    sequence: int
    changes: list[PageChange]


class PageSnapshot(Message, frozen=True, kw_only=True):
    """Part ``part`` of all pages that there were after event ``sequence``; the ``last`` one may be empty."""

    incarnation: str
    sequence: int
    part: int
    last: bool
    medium: Medium
    names: Names


FeedMessage = (
    RegisterWorker | RegisterStore | SetDrain | Neighbours | PushOrder | Heartbeat | Leaving | TransferEvent
    | PagesWanted | PageEvents | PageSnapshot
)  # fmt: skip
