"""Elements rounded to 8 bits with one scale a run, and back. Pure; rounding what was rounded before changes nothing.

It must never round an element that is not finite: there is no scale for it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from kvrelay.errors import Malformed
from kvrelay.types import DTYPE_BYTES, Codec

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_INT8_MAX = 127.0
_FP8_MAX = 448.0
"""Largest number of e4m3 (4 bits of exponent, 3 of mantissa, no infinity)."""
_REBIAS = np.float32(2.0**-8)
"""float16's exponent is biased by 15, e4m3's by 7: scaled by this, the exponent fields are equal."""
_HALF_LOST = 0x3F
"""float16 has 7 bits of mantissa more; just below half of what they can hold."""
_SCALE_BYTES = 4


def shrink(codec: Codec, raw: Bytes, dtype: str, run_bytes: int) -> tuple[Floats, Bytes] | None:
    """Scales (one a run) and codes (one an element) of ``raw``; None when an element is not finite."""
    values = _floats(raw, dtype).reshape(-1, run_bytes // DTYPE_BYTES[dtype])
    peak = np.abs(values).max(axis=1, keepdims=True)
    if not np.isfinite(peak).all():
        return None
    scales = (peak / np.float32(_INT8_MAX if codec is Codec.INT8 else _FP8_MAX)).astype(np.float32)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > np.finfo(np.float32).tiny)
    scaled = values * inverse
    return scales.ravel(), (_to_int8(scaled) if codec is Codec.INT8 else _to_fp8(scaled))


def grow(codec: Codec, body: memoryview, out: Bytes, dtype: str, run_bytes: int) -> None:
    """Fill ``out`` with what ``body`` (scales, then codes) stands for. Raises ``Malformed``."""
    runs, elements = len(out) // run_bytes, len(out) // DTYPE_BYTES[dtype]
    if len(body) != _SCALE_BYTES * runs + elements:
        raise Malformed(f"{runs} runs of {elements} elements in all cannot have {len(body)} bytes")
    scales = np.frombuffer(body[: _SCALE_BYTES * runs], np.float32)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise Malformed("a run's scale is no positive number")
    codes = np.frombuffer(body[_SCALE_BYTES * runs :], np.uint8)
    values = codes.view(np.int8).astype(np.float32) if codec is Codec.INT8 else _fp8_values()[codes]
    values = values.reshape(runs, -1) * scales[:, None]
    out[:] = _bytes(values.ravel(), dtype)


def _to_int8(scaled: Floats) -> Bytes:
    return np.rint(scaled).astype(np.int8).ravel().view(np.uint8)


def _to_fp8(scaled: Floats) -> Bytes:
    bits = (scaled * _REBIAS).astype(np.float16).ravel().view(np.uint16)
    sign = (bits >> 8).astype(np.uint8) & 0x80
    size = bits & 0x7FFF
    codes: Bytes = (size + _HALF_LOST + ((size >> 7) & 1) >> 7).astype(np.uint8)
    codes |= sign
    return codes


@cache
def _fp8_values() -> Floats:
    """What each of the 256 codes stands for, NaN codes as zero."""
    codes = np.arange(256, dtype=np.uint16)
    bits = (codes & 0x80) << 8 | (codes & 0x7F) << 7
    values = bits.view(np.float16).astype(np.float32) / _REBIAS
    values[(codes & 0x7F) == 0x7F] = 0
    return values


def _floats(raw: Bytes, dtype: str) -> Floats:
    if dtype == "bfloat16":
        wide = raw.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return raw.view(np.dtype(dtype)).astype(np.float32)


def _bytes(values: Floats, dtype: str) -> Bytes:
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return (bits + 0x7FFF + ((bits >> 16) & 1) >> 16).astype(np.uint16).view(np.uint8)
    limit = np.finfo(dtype).max
    return values.clip(-limit, limit).astype(dtype).view(np.uint8)
