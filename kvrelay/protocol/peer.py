"""A store and another store, over TCP; and over a unix socket where both are on one machine.

Some messages announce raw payload bytes that follow the frame; the reader takes exactly that many.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrelay.protocol.message import Message
from kvrelay.types import Codec, PageFormat, PageName, SlotRef, Transport

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Checksum = Annotated[int, msgspec.Meta(ge=0)]


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
    indices: list[Index]
    shards: int = 1
    """Shards of each page; pages of other writers are offered by another message."""


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
    elsewhere: list[int] = []
    """Offered pages that others are bringing there: the sender holds them until ``PushNews`` tells of them."""


class PushNews(Message, frozen=True, kw_only=True):
    """What became of pages of ``PushWanted.elsewhere`` at the receiver."""

    transfer: str
    over: list[Index]
    """Pages that came, or are not wanted any more: the sender need not hold them."""
    lacking: list[Index]
    """Pages that did not come: the sender offers them again."""


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Segments (one layer of one page each) in the order of their bytes, as columns: a batch has thousands of them."""

    pages: list[Index]
    """Positions among the names of the transfer."""
    layers: list[Index]
    checksums: list[Checksum]
    """Checksums of each shard's share of the first segment, then of the second, and so on; all have equally many
    shards."""


class Segments(Message, frozen=True, kw_only=True):
    """Raw bytes of the segments of ``manifest`` follow: ``payload_bytes`` in all. Answered by ``Taken``.

    ``serial``: a batch that was cut off is sent again under the same one, over another stream.
    """

    transfer: str
    manifest: Manifest
    payload_bytes: int
    serial: int = 0
    codec: Codec = Codec.RAW
    """In which the payload is encoded; ``payload_bytes`` are those that travel, and ``manifest`` speaks of the others.

    Where a codec rounds, ``manifest`` speaks of bytes that the receiver cannot have: it relies on ``wire_checksum``.
    """
    wire_checksum: int = 0
    """Checksum of an encoded payload as it travels."""


class Written(Message, frozen=True, kw_only=True):
    """The segments of ``manifest`` were written into the slots that were lent for them. Answered by ``Taken``."""

    transfer: str
    manifest: Manifest
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


PeerMessage = (
    PushOpen | PushPages | PushWanted | PushNews | Segments | Written | Taken | PushDamaged | PushClosed
    | Meet | Met | Join | FindArena | ArenaFound | Probe | Probed | Nudge
)  # fmt: skip
