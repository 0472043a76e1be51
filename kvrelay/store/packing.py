"""Segments as they travel over a slow link, and back, with checksums of what travels. For worker threads: no I/O.

It must never hide damage: bytes that are not what their writer vouched for are not encoded with loss, which would give
them a new checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from kvrelay.errors import Malformed
from kvrelay.store.arena import checksums
from kvrelay.store.codec import Bytes, Run, decode, encode, size_bytes
from kvrelay.types import LOSSY, Codec, PageFormat

MAX_PACKED_BYTES = 16 << 20
"""Most decoded bytes of one message: what a message makes its receiver allocate."""


class Packed(NamedTuple):
    """An encoded payload."""

    pieces: list[bytes]
    size_bytes: int
    checksum: int


def pack(codec: Codec, views: Sequence[memoryview], sums: Iterable[list[int]], format: PageFormat) -> Packed | None:
    """``views`` (segments of pages of ``format``) in ``codec``; None when they are to travel as they are.

    ``sums``: of each segment's shards, as the writer published them. None when encoding gains nothing, and when bytes
    that would be rounded do not match: their receiver is to find that out.
    """
    raw_bytes = sum(map(len, views))
    if raw_bytes > MAX_PACKED_BYTES:
        return None
    if codec in LOSSY:
        views = [memoryview(bytes(view)) for view in views]  # what is verified must be what is encoded
        if not _are_sound(views, list(sums), format):
            return None
    pieces = encode(
        codec, [Run(view, _segment_bytes(view, format) // (2 * format.kv_heads)) for view in views], format.dtype
    )
    size = size_bytes(pieces)
    return Packed(pieces, size, _checksum(pieces)) if size < raw_bytes else None


def unpack(codec: Codec, payload: memoryview, checksum: int, raw_bytes: int, format: PageFormat) -> Bytes | None:
    """The segments' bytes; None when ``payload`` was damaged on its way. Raises ``Malformed`` if it was made wrong."""
    if not len(payload) < raw_bytes <= MAX_PACKED_BYTES:
        raise Malformed(f"{raw_bytes} bytes are not sent as {len(payload)}")
    return decode(codec, payload, raw_bytes, format.dtype) if _checksum([payload]) == checksum else None


def _are_sound(views: Iterable[memoryview], sums: list[list[int]], format: PageFormat) -> bool:
    found = [each for view in views for each in checksums(view, _segment_bytes(view, format) // len(sums[0]))]
    return found == [each for segment in sums for each in segment]


def _segment_bytes(view: memoryview, format: PageFormat) -> int:
    """Length of a segment of ``view``: several follow one another only where all are full (``Arena.views``)."""
    return min(len(view), format.segment_bytes)


def _checksum(pieces: Iterable[bytes | memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()
