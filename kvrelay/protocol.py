"""Every message that crosses a process, and how bytes become messages. No I/O happens here.

A frame is a 4-byte little-endian length and that many bytes: msgpack, and at its end 8 bytes of the msgpack's XXH3
(little-endian). Payloads have checksums of their own, but which page and layer they are is said here: a number that was
damaged on its way would bring sound bytes under the wrong name. Some messages announce raw payload bytes that follow
the frame (``Segments``); the reader takes exactly that many.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Annotated

import msgspec
import xxhash

from kvrelay.errors import Malformed, Refused
from kvrelay.types import Codec, Medium, PageFormat, PageName, SlotRef, Stage, StoreInfo, Transport, WorkerInfo

WIRE_VERSION = 3
MAX_FRAME_BYTES = 4 << 20
"""Longest message: 100k page names are 1.8 MB."""
MAX_PAYLOAD_BYTES = 64 << 20
"""Longest raw payload after one frame."""
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 8


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


# ---------------------------------------------------------------- handshake: first three frames of every link


class Hello(Message, frozen=True, kw_only=True):
    version: int
    purpose: str
    """``client`` (a worker or script at its node's store), ``peer`` (store to store), ``data`` (a peer's second link,
    for payload), ``map`` (a peer of the same machine that maps an arena), ``feed`` (to a router)."""
    sender: str
    nonce: bytes


class Challenge(Message, frozen=True, kw_only=True):
    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True, kw_only=True):
    proof: bytes


class Rejected(Message, frozen=True, kw_only=True):
    """The link is refused, or a request failed; ``code`` is an error class of ``errors``."""

    code: str
    reason: str
    id: int = 0


class Welcome(Message, frozen=True, kw_only=True):
    receiver: str


def prove(key: bytes, side: str, hello_nonce: bytes, challenge_nonce: bytes) -> bytes:
    """Proof that ``side`` (``server`` or ``client``) holds ``key``, bound to both nonces."""
    text = side.encode() + b"\0" + hello_nonce + challenge_nonce
    return hmac.new(key, text, hashlib.sha256).digest()


def check_proof(key: bytes, side: str, hello_nonce: bytes, challenge_nonce: bytes, proof: bytes) -> None:
    """Raise ``Refused`` unless ``proof`` is right."""
    if not hmac.compare_digest(prove(key, side, hello_nonce, challenge_nonce), proof):
        raise Refused("the peer does not hold this cluster's key; give both sides the same key file")


def engine_key(key: bytes) -> str:
    """Bearer token of the cluster's engines; who sees it can ask engines, but cannot become a member."""
    return hmac.new(key, b"kvrelay/engine/1", hashlib.sha256).hexdigest()


# ---------------------------------------------------------------- client <-> its node's store (unix socket)
#
# Requests carry an ``id``; the answer carries the same one. Messages without an ``id`` are one-way.


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


# ---------------------------------------------------------------- store <-> store (TCP)


class PushOpen(Message, frozen=True, kw_only=True):
    transfer: str
    format: PageFormat
    names: list[PageName]
    total_tokens: int
    direct: bool = False
    """The sender may write into the slots of the pages by itself; ``PushWanted`` is to name them."""
    codec: Codec = Codec.RAW
    """In which the sender would send ``Segments``, should they travel by TCP."""


class PushPages(Message, frozen=True, kw_only=True):
    """These pages of the transfer's names exist at the sender. Answered by ``PushWanted``."""

    transfer: str
    indices: list[int]
    shards: int = 1
    """Of each of them; pages of other writers are offered by another message."""


class PushWanted(Message, frozen=True, kw_only=True):
    """Which of the offered pages the receiver lacks and has made room for.

    The ``slots`` are lent to a sender that said in ``PushOpen`` that it writes into the receiver's arena, until it
    sends ``PushClosed``.
    """

    transfer: str
    indices: list[int]
    slots: list[SlotRef] = []
    codec: Codec = Codec.RAW
    """The one of ``PushOpen``, or RAW: the receiver does not take it, and all that follows travels as it is."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One layer of one page, in the payload that follows; ``checksums``: of each shard's share of those bytes."""

    page: int
    layer: int
    checksums: list[int]


class Segments(Message, frozen=True, kw_only=True):
    """Raw bytes of ``items``, in this order, follow this frame: ``payload_bytes`` in all. Answered by ``Taken``.

    ``serial``: a batch that was cut off is sent again under the same one, over another stream.
    """

    transfer: str
    items: list[Segment]
    payload_bytes: int
    serial: int = 0
    codec: Codec = Codec.RAW
    """In which the payload is encoded; ``payload_bytes`` are those that travel, and ``items`` speak of the others.

    Where a codec rounds, ``items`` speak of bytes that the receiver cannot have: it relies on ``wire_checksum``.
    """
    wire_checksum: int = 0
    """Of an encoded payload as it travels."""


class Written(Message, frozen=True, kw_only=True):
    """The sender has written ``items`` into the slots that were lent to it. Answered by ``Taken``."""

    transfer: str
    items: list[Segment]
    payload_bytes: int
    serial: int
    transport: Transport


class Taken(Message, frozen=True, kw_only=True):
    """The receiver is through with a batch: its sound segments are published, the pages of others given up."""

    serial: int


class PushDamaged(Message, frozen=True, kw_only=True):
    """Checksums of these pages did not hold at the receiver: the sender looks at its own copy.

    By name: the transfer may have ended at the sender meanwhile.
    """

    names: list[PageName]


class PushClosed(Message, frozen=True, kw_only=True):
    """The sender sends no more for this transfer; ``complete`` when everything wanted was sent."""

    transfer: str
    complete: bool
    reason: str = ""


# Paths between two stores: the sender asks over the link of its pushes. Requests carry a ``serial`` as batches do.


class Meet(Message, frozen=True, kw_only=True):
    """Which ways to carry pages does the receiver offer?"""

    serial: int


class Met(Message, frozen=True, kw_only=True):
    """Answer to ``Meet``. ``ticket`` is what further links of this sender show."""

    serial: int
    ticket: bytes
    transports: list[Transport]
    socket: str = ""
    """Path of the unix socket at which a process of the same machine gets the arenas."""


class Join(Message, frozen=True, kw_only=True):
    """First message of a data link (``Segments`` and ``Probe`` follow): the link of pushes that it belongs to."""

    ticket: bytes


class FindArena(Message, frozen=True, kw_only=True):
    """Where is the arena of ``format``, for writes from another machine? None: the one that probes are written to.

    With a ``ticket`` over a link of its own on the same machine: the answer comes with the arena's file descriptor.
    """

    serial: int
    format: PageFormat | None
    ticket: bytes = b""


class ArenaFound(Message, frozen=True, kw_only=True):
    """Answer to ``FindArena``. ``agent``: NIXL's metadata of the receiver; ``address`` of the first slot there."""

    serial: int
    format: PageFormat
    slot: int = 0
    """Lent for probes, when it is their arena."""
    address: int = 0
    agent: bytes = b""


class Probe(Message, frozen=True, kw_only=True):
    """A known pattern of ``size_bytes``: it follows, or was ``written`` into the slot lent for probes."""

    serial: int
    size_bytes: int
    checksum: int
    written: bool = False


class Probed(Message, frozen=True, kw_only=True):
    """Answer to ``Probe``: whether the checksum held."""

    serial: int
    good: bool


class Nudge(Message, frozen=True, kw_only=True):
    """A one-sided write needs its receiver's processor for a moment. No answer."""


# ---------------------------------------------------------------- workers and stores -> routers (TCP)


class RegisterWorker(Message, frozen=True, kw_only=True):
    worker: WorkerInfo


class RegisterStore(Message, frozen=True, kw_only=True):
    store: StoreInfo


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every ``heartbeat_s``. Not ``healthy``: the engine does not answer, and the router sends it no work."""

    name: str
    incarnation: str
    healthy: bool
    counts: dict[str, int] = {}
    links: list[LinkReport] = []
    """A store's ways to its peers."""


class Neighbours(Message, frozen=True, kw_only=True):
    """A router tells a store where the others are: it tests its paths to them before they are needed."""

    addresses: list[str]


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


AnyMessage = (
    Hello | Challenge | Proof | Rejected | Welcome
    | Attach | Attached | Allocate | Granted | Announce | OpenTransfer | Milestone
    | Acquire | Acquired | Release | Suspect | Exists | Existing | Describe | Described | Report
    | PushOpen | PushPages | PushWanted | Segments | Written | Taken | PushDamaged | PushClosed
    | Meet | Met | Join | FindArena | ArenaFound | Probe | Probed | Nudge
    | RegisterWorker | RegisterStore | Neighbours | Heartbeat | Leaving | TransferEvent
    | PagesWanted | PageEvents | PageSnapshot
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One whole frame. Raises ``Malformed`` when the message is longer than ``MAX_FRAME_BYTES``."""
    body = _encoder.encode(message)
    size = len(body) + _CHECKSUM_BYTES
    if size > MAX_FRAME_BYTES:
        raise Malformed(f"{type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return size.to_bytes(_LENGTH_BYTES, "little") + body + _checksum(body)


def _checksum(body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message of one frame's body. Raises ``Malformed``."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Malformed(f"not a message of wire version {WIRE_VERSION}: {error}") from error


def _intact(frame: bytes) -> memoryview:
    """The message's bytes. Raises ``Malformed`` when they are not those that were sent."""
    body = memoryview(frame)[:-_CHECKSUM_BYTES]
    if frame[-_CHECKSUM_BYTES:] != _checksum(body):
        raise Malformed(f"a frame was damaged on its way, or is not of wire version {WIRE_VERSION}")
    return body


class FrameReader:
    """Turns a byte stream into messages; ``take`` hands out raw payload bytes that were already received."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def __repr__(self) -> str:
        return f"<FrameReader {len(self._buffer)} bytes waiting>"

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def next(self) -> Message | None:
        """The next whole message, or None until more bytes are fed. Raises ``Malformed``."""
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        if size > self.max_frame_bytes:
            raise Malformed(f"a frame of {size} bytes is over the limit of {self.max_frame_bytes}")
        end = _LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        message = decode(_intact(bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])))
        del self._buffer[:end]
        return message

    def take(self, view: memoryview) -> int:
        """Move up to ``len(view)`` buffered bytes into ``view``; how many."""
        count = min(len(view), len(self._buffer))
        view[:count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    def __iter__(self) -> Iterator[Message]:
        while (message := self.next()) is not None:
            yield message


# ---------------------------------------------------------------- router -> engine, inside ``kv_transfer_params``

HANDOFF_KEY = "kvrelay"
"""Our key in ``kv_transfer_params``; never accepted from clients."""


class PrefillLeg(Message, frozen=True, kw_only=True):
    """What P's connector is told."""

    transfer: str
    push_to: str | None
    """Address of D's node store; None when P and D share one."""


class DecodeLeg(Message, frozen=True, kw_only=True):
    """What D's connector is told: which transfers bring pages of this request's prompts. A hint, never an identity."""

    transfers: list[str]
    home: str | None = None
    """Address of P's node store, when it is another than D's: the pages that D generates go there for the next turn."""
    page_dtypes: list[str] = []
    """KV types of the pages that the transfers bring, where they are not D's own: it may load and convert those.

    The request's ``cache_salt`` is then ``identity.near_salt``: D's own cache keeps what was converted apart.
    """


Handoff = PrefillLeg | DecodeLeg


def handoff_params(leg: Handoff) -> dict[str, object]:
    """``leg`` as a JSON-ready ``kv_transfer_params`` value."""
    built: dict[str, object] = msgspec.to_builtins(leg)
    return {HANDOFF_KEY: built}


def read_handoff(params: object) -> Handoff | None:
    """The leg inside ``kv_transfer_params``; None when there is none. Raises ``Malformed``."""
    if not isinstance(params, dict) or HANDOFF_KEY not in params:
        return None
    try:
        return msgspec.convert(params[HANDOFF_KEY], PrefillLeg | DecodeLeg)
    except msgspec.ValidationError as error:
        raise Malformed(f"kv_transfer_params.{HANDOFF_KEY}: {error}") from error
