"""Elements rounded to 8 bits with one scale a run, and back. Pure; rounding what was rounded before changes nothing.

It must never round an element that is not finite: there is no scale for it. Everything is done with the bits of
float32 and in pieces that stay in a core's cache: that is several times as fast as casts of whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.errors import Malformed
from kvrelay.types import DTYPE_BYTES, Codec

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

_PEAK = {Codec.INT8: np.float32(127), Codec.FP8: np.float32(448)}
"""Largest code. FP8 is e4m3: 4 bits of exponent, 3 of mantissa, no infinity."""
_MOST_BFLOAT16 = np.uint32(0x7F7F0000).view(np.float32)
_PIECE_ELEMENTS = 1 << 15
_MAGIC = np.float32(3 << 22)
"""A float32 of this size has steps of one: added to a small number, its low bits are that number, rounded."""
_REBIAS = np.float32(2.0**-120)
"""float32's exponent is biased by 127, e4m3's by 7: scaled by this, the exponent fields are equal."""
_SCALE_BYTES = 4


def shrink(codec: Codec, raw: Bytes, dtype: str, run_bytes: int) -> tuple[Floats, Bytes] | None:
    """Scales (one a run) and codes (one an element) of ``raw``; None when that would not be rounded but broken.

    So it is with an element that is not finite, and with those that have 8 bits already.
    """
    if DTYPE_BYTES[dtype] == 1:
        return None
    run_elements = run_bytes // DTYPE_BYTES[dtype]
    words = raw.view(_plain(dtype)).reshape(-1, run_elements)
    scales, codes = np.empty(len(words), np.float32), np.empty(words.shape, np.uint8)
    for rows in _pieces(len(words), run_elements):
        values = _floats(words[rows], dtype)
        peaks = np.maximum(values.max(axis=1), -values.min(axis=1))
        if not np.isfinite(peaks).all():
            return None
        scales[rows] = peaks / _PEAK[codec]
        tiny = scales[rows] <= np.finfo(np.float32).tiny
        values *= np.divide(1, scales[rows], out=np.zeros(len(peaks), np.float32), where=~tiny)[:, None]
        codes[rows] = _int8_codes(values) if codec is Codec.INT8 else _fp8_codes(values)
    return scales, codes


def grow(codec: Codec, body: memoryview, out: Bytes, dtype: str, run_bytes: int) -> None:
    """Fill ``out`` with what ``body`` (scales, then codes) stands for. Raises ``Malformed``."""
    runs, run_elements = len(out) // run_bytes, run_bytes // DTYPE_BYTES[dtype]
    if DTYPE_BYTES[dtype] == 1 or len(body) != runs * (_SCALE_BYTES + run_elements):
        raise Malformed(f"{runs} runs of {run_elements} elements of {dtype} cannot have {len(body)} bytes")
    scales = np.frombuffer(body[: _SCALE_BYTES * runs], np.float32)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise Malformed("a run's scale is no positive number")
    codes = np.frombuffer(body[_SCALE_BYTES * runs :], np.uint8).reshape(runs, run_elements)
    words = out.view(_plain(dtype)).reshape(runs, run_elements)
    for rows in _pieces(runs, run_elements):
        values = codes[rows].view(np.int8).astype(np.float32) if codec is Codec.INT8 else _fp8_values(codes[rows])
        with np.errstate(over="ignore"):  # nobody who rounds makes such a scale
            values *= scales[rows, None]
        words[rows] = _rounded(values, dtype)


def _pieces(rows: int, run_elements: int) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // run_elements)
    return (slice(start, start + step) for start in range(0, rows, step))


def _int8_codes(scaled: Floats) -> Bytes:
    scaled += _MAGIC
    return scaled.view(np.uint32).astype(np.uint8)


def _fp8_codes(scaled: Floats) -> Bytes:
    scaled *= _REBIAS
    bits = scaled.view(np.uint32)
    signs = (bits >> 24).astype(np.uint8) & 0x80
    bits &= 0x7FFFFFFF
    codes = _drop(bits, 20).astype(np.uint8)
    codes |= signs
    return codes


def _fp8_values(codes: Bytes) -> Floats:
    """What the codes stand for. NaN has codes of its own, which nobody makes: they become 480."""
    bits = codes.astype(np.uint32)
    signs = bits & 0x80
    bits &= 0x7F
    bits <<= 20
    signs <<= 24
    bits |= signs
    values = bits.view(np.float32)
    values /= _REBIAS
    return values


def _drop(bits: Words, count: int) -> Words:
    """``bits`` without the lowest ``count``, rounded to the nearest, ties to even. Changes ``bits``."""
    odd = bits >> count
    odd &= 1
    bits += (1 << count - 1) - 1
    bits += odd
    bits >>= count
    return bits


def _plain(dtype: str) -> Any:
    """The numpy type of an element's bits: numpy has no bfloat16."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def _floats(words: npt.NDArray[Any], dtype: str) -> Floats:
    """A copy as float32."""
    if dtype != "bfloat16":
        return words.astype(np.float32)
    wide = words.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _rounded(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """``values`` as elements of ``dtype``, the largest one where it holds no more. May change ``values``."""
    limit = _MOST_BFLOAT16 if dtype == "bfloat16" else np.finfo(dtype).max
    values = values.clip(-limit, limit, out=values)
    return _drop(values.view(np.uint32), 16) if dtype == "bfloat16" else values
