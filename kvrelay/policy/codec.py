"""Which codec a transfer should take, by the time its bytes need. It must never choose loss that was not asked for."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.types import Codec, Value

BATCH_BYTES = 4 << 20
"""What is encoded, sent and decoded at a time; while one batch is on the wire the next one is encoded.

Long enough to hide the cost of a message, short enough that pushes to one peer take turns.
"""
MARGIN = 0.15
"""Share by which another codec must be faster than the present one: measured speeds vary by as much."""


class CodecSpeed(Value, frozen=True, kw_only=True):
    """What a codec costs and saves, as measured."""

    codec: Codec
    encode_bytes_s: float
    """Decoded bytes that one core encodes in a second."""
    decode_bytes_s: float
    ratio: float
    """Decoded bytes over encoded bytes."""


RAW = CodecSpeed(codec=Codec.RAW, encode_bytes_s=float("inf"), decode_bytes_s=float("inf"), ratio=1.0)


class CodecChoice(Value, frozen=True, kw_only=True):
    """The codec, and the seconds that each candidate would have taken."""

    codec: Codec
    seconds: tuple[tuple[Codec, float], ...]


def transfer_s(speed: CodecSpeed, link_bytes_s: float, size_bytes: int) -> float:
    """Seconds from the first byte that is encoded to the last one that is decoded.

    Encoding, wire and decoding work on different batches at the same time: the slowest of them sets the pace, and the
    first batch passes through all three.
    """
    stages = (1 / speed.encode_bytes_s, 1 / (speed.ratio * link_bytes_s), 1 / speed.decode_bytes_s)
    first = min(size_bytes, BATCH_BYTES)
    return first * sum(stages) + (size_bytes - first) * max(stages)


def choose_codec(
    link_bytes_s: float | None, size_bytes: int, speeds: Iterable[CodecSpeed], lossy: Codec | None, present: Codec
) -> CodecChoice:
    """The fastest codec for ``size_bytes`` over a link, or ``present`` when nothing is faster by ``MARGIN``.

    ``speeds``: the codecs that both ends can use. ``lossy``: the rounding that the pages' identity allows, None for
    none. A link whose speed is not known yet (None) counts as fast: bytes travel as they are.
    """
    allowed = [RAW, *(speed for speed in speeds if speed.codec in (Codec.LOSSLESS, lossy))]
    if link_bytes_s is None or link_bytes_s <= 0:
        return CodecChoice(codec=Codec.RAW, seconds=())
    seconds = {speed.codec: transfer_s(speed, link_bytes_s, size_bytes) for speed in allowed}
    best = min(seconds, key=seconds.__getitem__)
    stays = present in seconds and seconds[present] <= seconds[best] * (1 + MARGIN)
    return CodecChoice(codec=present if stays else best, seconds=tuple(seconds.items()))


def break_even_bytes_s(speed: CodecSpeed) -> float:
    """Link speed below which a long transfer is faster with ``speed`` than raw."""
    return min(speed.encode_bytes_s, speed.decode_bytes_s) if speed.ratio > 1 else 0.0
