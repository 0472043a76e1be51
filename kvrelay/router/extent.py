"""How much a body may consist of. It must look at the bytes alone: what is read as JSON first is paid for already."""

from __future__ import annotations

import sys

from kvrelay.errors import BadRequest

MAX_PARTS = 100_000
"""Objects, lists and strings in a body, names of fields included: 20,000 messages of a chat. While each is read, for a
microsecond or so, nobody else is served."""
MAX_VALUES = 1 << 21
"""Values in a body, numbers included: two prompts of a million token ids. Each takes a tenth of that."""

MAX_DIGITS = 640
"""Most digits of one integer, the least limit that Python takes: reading one takes time with the square of its
length."""


def limit_integers() -> None:
    """Let this process read and write no integer of more than ``MAX_DIGITS``."""
    sys.set_int_max_str_digits(MAX_DIGITS)


def check_extent(data: bytes) -> None:
    """Raises ``BadRequest`` (413) when ``data`` is JSON of more than ``MAX_PARTS`` parts or ``MAX_VALUES`` values."""
    if _fits(data, data.count(b'"')):  # nearly always, though this counts what a text consists of as well
        return
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = unescaped.count(b'"')
    if quotes > 2 * MAX_PARTS or not _fits(b"".join(unescaped.split(b'"')[::2]), quotes):
        raise BadRequest(
            f"the body consists of more than {MAX_PARTS:,} objects, lists and strings, or of more than {MAX_VALUES:,} "
            "values; send them in several requests",
            status=413,
        )


def _fits(data: bytes, quotes: int) -> bool:
    parts = data.count(b"{") + data.count(b"[") + quotes // 2
    return parts <= MAX_PARTS and data.count(b",") < MAX_VALUES
