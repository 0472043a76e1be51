"""Where things are in the memory of an arena, as a header says it. What they mean is the arena's business.

Two processes must never map one arena with different ideas of it: whoever attaches checks the header first.
"""

from __future__ import annotations

import fcntl
import os

import numpy as np

from kvrelay.errors import Incompatible, Malformed
from kvrelay.types import DTYPE_BYTES, Codec, PageFormat

_MAGIC = 0x316C6572766B  # "kvrel1"
_LAYOUT_VERSION = 2
MEMORY_PAGE = 4096
HEADER = np.dtype([(name, np.int64) for name in ("magic", "version", "epoch", "slots", "stride", "geometry")])


def slot_stride(format: PageFormat) -> int:
    """Bytes from one slot to the next: a page rounded up to whole memory pages, so that a hole can be punched."""
    return -(-format.page_bytes // MEMORY_PAGE) * MEMORY_PAGE


def _geometry(format: PageFormat) -> int:
    """``format`` as one positive integer, for a check of two processes' ideas of it."""
    dtype = sorted(DTYPE_BYTES).index(format.dtype)
    packed = 0
    for part in (format.layers, format.kv_heads, format.head_dim, format.page_tokens):
        packed = packed << 14 | part
    lossy = 0 if format.lossy is None else 1 + list(Codec).index(format.lossy)
    return (packed << 4 | dtype) << 3 | lossy


def meta_bytes(format: PageFormat, slots: int) -> int:
    """Bytes before the first slot: header, and columns of slots and of their marks."""
    used = MEMORY_PAGE + 8 * slots * (3 + 2 * format.layers * format.kv_heads)
    return -(-used // MEMORY_PAGE) * MEMORY_PAGE


def header_of(format: PageFormat, slots: int, epoch: int) -> tuple[int, ...]:
    """What ``HEADER`` says of a new arena."""
    return (_MAGIC, _LAYOUT_VERSION, epoch, slots, slot_stride(format), _geometry(format))


def check_header(fd: int, format: PageFormat) -> int:
    """Slots of the arena behind ``fd``, once its header agrees with ``format`` and with the file's size.

    Raises ``Malformed``, ``Incompatible``.
    """
    if not _is_sealed(fd):
        raise Malformed("the descriptor is no memory that nobody can shrink: to touch what is gone would kill us")
    size = os.fstat(fd).st_size
    if size < MEMORY_PAGE:
        raise Malformed(f"an arena of {size} bytes has no header")
    header = np.frombuffer(os.pread(fd, HEADER.itemsize, 0), HEADER)[0]
    if (int(header["magic"]), int(header["version"])) != (_MAGIC, _LAYOUT_VERSION):
        raise Malformed("the descriptor is no arena of this version; run the same kvrelay on both sides")
    if int(header["geometry"]) != _geometry(format):
        raise Incompatible("format", _geometry(format), int(header["geometry"]))
    slots = int(header["slots"])
    if size != meta_bytes(format, slots) + slots * slot_stride(format):
        raise Malformed(f"an arena of {size} bytes cannot hold {slots} slots of {slot_stride(format)} bytes")
    return slots


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no anonymous memory
        return False
