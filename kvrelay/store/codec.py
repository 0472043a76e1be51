"""Segments as fewer bytes for a slow link: without loss, or rounded to 8 bits an element. No I/O happens here.

It must never believe a length that arrived: what is decoded has exactly the size and the element type that the receiver
expects, and nothing larger is ever allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvrelay.errors import Malformed, Refused
from kvrelay.store import rounding
from kvrelay.types import DTYPE_BYTES, Codec


def _library() -> Any:
    """zstandard; None on a node without it, which sends and takes everything else."""
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


zstandard = _library()

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

_HEAD = struct.Struct("<B3xIII")
"""Of each block: what its body is, bytes of a run, bytes decoded, bytes of the body."""
_STORED, _PLANES, _INT8, _FP8 = range(4)
_ROUNDED = {Codec.INT8: _INT8, Codec.FP8: _FP8}
_ALLOWED = {Codec.LOSSLESS: _PLANES} | _ROUNDED
_WORD: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_LOWER: dict[int, tuple[Any, ...]] = {1: (), 2: (np.uint8,), 4: (np.uint8, np.uint16)}
"""Parts of an element below its highest byte, from the top, by bytes an element."""
_WORTH = 0.97
"""A plane that does not shrink below this share travels as it is: it then costs no decoding."""


class Run(NamedTuple):
    """Bytes to encode: whole segments, made of runs that share one scale (K or V of one KV head of one layer)."""

    view: memoryview
    run_bytes: int


def usable(codec: Codec) -> bool:
    """Whether this process can encode and decode ``codec``."""
    return zstandard is not None or codec is not Codec.LOSSLESS


def encode(codec: Codec, runs: Iterable[Run], dtype: str) -> list[bytes]:
    """``runs`` as pieces to be sent one after the other. Raises ``Refused`` when ``codec`` is not usable here.

    Rounded to ``INT8`` or ``FP8``, a block with an element that is not finite is stored as it is.
    """
    if not usable(codec):
        raise Refused("zstandard is not installed: install it, or set store.codec to raw")
    pieces: list[bytes] = []
    for run_bytes, group in groupby(runs, lambda run: run.run_bytes):
        raw = np.concatenate([np.frombuffer(run.view, np.uint8) for run in group])
        kind, body = _body(codec, raw, dtype, run_bytes)
        pieces += [_HEAD.pack(kind, run_bytes, len(raw), sum(map(len, body))), *body]
    return pieces


def decode(codec: Codec, payload: memoryview, raw_bytes: int, dtype: str) -> Bytes:
    """The ``raw_bytes`` bytes that ``payload`` stands for. Raises ``Malformed`` on what ``encode`` cannot have made."""
    out = np.empty(raw_bytes, np.uint8)
    taken = written = 0
    while taken < len(payload):
        body, raw, unpack = _block(codec, payload[taken:], raw_bytes - written, dtype)
        unpack(body, out[written : written + raw])
        taken, written = taken + _HEAD.size + len(body), written + raw
    if written != raw_bytes:
        raise Malformed(f"{written} bytes were encoded where {raw_bytes} are expected")
    return out


def _body(codec: Codec, raw: Bytes, dtype: str, run_bytes: int) -> tuple[int, list[bytes]]:
    rounded = rounding.shrink(codec, raw, dtype, run_bytes) if codec in _ROUNDED else None
    if rounded is not None:
        return _ROUNDED[codec], [part.tobytes() for part in rounded]
    planes = _split(raw, DTYPE_BYTES[dtype]) if codec is Codec.LOSSLESS else None
    return (_STORED, [raw.tobytes()]) if planes is None else (_PLANES, planes)


def _block(
    codec: Codec, payload: memoryview, room: int, dtype: str
) -> tuple[memoryview, int, Callable[[memoryview, Bytes], None]]:
    """Body of the first block, the bytes that it stands for, and what turns one into the other."""
    if len(payload) < _HEAD.size:
        raise Malformed("an encoded payload ends inside a block's head")
    kind, run_bytes, raw, size = _HEAD.unpack_from(payload)
    width = DTYPE_BYTES[dtype]
    body = payload[_HEAD.size : _HEAD.size + size]
    if kind not in (_STORED, _ALLOWED.get(codec)) or len(body) != size:
        raise Malformed(f"an encoded payload holds a block of kind {kind} with {size} bytes, which was not agreed on")
    if not 0 < raw <= room or not 0 < run_bytes <= raw or raw % run_bytes or run_bytes % width:
        raise Malformed(f"a block of {raw} bytes in runs of {run_bytes} does not fit what is expected")
    if kind == _STORED:
        return body, raw, _copy
    if kind == _PLANES:
        return body, raw, lambda packed, out: _join(packed, out, width)
    return body, raw, lambda packed, out: rounding.grow(codec, packed, out, dtype, run_bytes)


def _copy(body: memoryview, out: Bytes) -> None:
    if len(body) != len(out):
        raise Malformed(f"a stored block of {len(body)} bytes stands for {len(out)}")
    out[:] = np.frombuffer(body, np.uint8)


# ---------------------------------------------------------------- without loss
#
# Sign and exponent of neighbouring elements are alike; mantissas are noise. So the highest byte of every element goes
# through an entropy coder, and the others travel as they are. Matches are rare: a hash table of 64 entries finds as
# much as the default one, at less than half the time (docs/decisions/0011).


def _packer() -> Any:
    """A new one each time: used by two threads at once, it takes the process down."""
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _split(raw: Bytes, width: int) -> list[bytes] | None:
    """The packed highest bytes, then the other planes; None when that is no gain."""
    words: Words = raw.view(_WORD[width])
    highest = (words >> 8 * (width - 1)).astype(np.uint8) if width > 1 else words
    packed: bytes = _packer().compress(highest)
    if len(packed) > _WORTH * len(highest):
        return None
    planes, bits = [packed], 8 * (width - 1)
    for kind in _LOWER[width]:
        bits -= 8 * np.dtype(kind).itemsize
        planes.append((words >> bits if bits else words).astype(kind).tobytes())
    return planes


def _join(body: memoryview, out: Bytes, width: int) -> None:
    words: Words = out.view(_WORD[width])
    packed_bytes = len(body) - (width - 1) * len(words)
    if packed_bytes <= 0:
        raise Malformed(f"a block of {len(out)} bytes is packed into {len(body)}, which leaves out a plane")
    words[:] = _unpack(body[:packed_bytes], len(words))
    start = packed_bytes
    for kind in _LOWER[width]:
        size = len(words) * np.dtype(kind).itemsize
        words <<= 8 * np.dtype(kind).itemsize
        words |= np.frombuffer(body[start : start + size], kind)
        start += size


def _unpack(packed: memoryview, size: int) -> Bytes:
    """The plane of ``size`` bytes; the frame's own claim is checked before a byte is allocated for it."""
    if zstandard is None:
        raise Malformed("a packed block came to a node that said it cannot unpack")
    try:
        if zstandard.get_frame_parameters(packed).content_size != size:
            raise Malformed(f"a plane of {size} bytes is packed as one of another length")
        plane = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Malformed(f"a packed plane cannot be unpacked: {error}") from error
    return np.frombuffer(plane, np.uint8)


def size_bytes(pieces: Sequence[bytes]) -> int:
    """Bytes that ``pieces`` take on the wire."""
    return sum(map(len, pieces))
