"""When two pages are the same. Pure functions of their arguments: equal in every process, on every machine."""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from kvrelay.types import Fingerprint, PageFormat, PageName, Value

NAMING_VERSION = 3
NAME_BYTES = 16
"""128 bits: no accidental collision; a deliberate one costs 2**64 hashes and stays inside one salt."""

CONVERTIBLE_DTYPES = frozenset({"float32", "bfloat16"})
"""KV types that convert into each other with nothing but rounding; float16 would overflow."""

_NEAR = ".near"
"""An engine takes salts of at most 128 characters, and none with a slash, backslash, ``@`` or NUL."""

_ROOT = b"kvrelay/root/2"
_PAGE_HASH = hashlib.blake2b(digest_size=NAME_BYTES, person=b"kvrelay/page/2")
"""Only ever copied. A copy costs half of what a new object with its arguments does, and names are made for every page.

Faster hashes (xxh3) were rejected: whoever writes a prompt could make two pages of one name.
"""


def frame(parts: Iterable[bytes]) -> bytes:
    """Join ``parts`` so that no two different lists give the same bytes (``a+bc`` is not ``ab+c``)."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def root_name(fingerprint: Fingerprint, *, salt: str = "", adapter: str = "") -> PageName:
    """Name that a prompt's first page is chained to.

    ``salt`` separates tenants; ``adapter`` is the digest of a LoRA adapter's files, empty without one.
    All of the fingerprint is in it: workers find pages by name alone, whomever a router would pair, so that two whose
    pages are not exactly each other's (two versions of an engine at one store) must not name them alike. Block size and
    layout of the engine are no part of a fingerprint: pages are canonical.
    """
    fmt = fingerprint.format
    parts = [
        *(_text(getattr(fingerprint, name)) for name in _fields(fingerprint)),
        *(_text(getattr(fmt, name)) for name in _fields(fmt)),
        adapter.encode(),
        salt.encode(),
    ]
    digest = hashlib.blake2b(frame(parts), digest_size=NAME_BYTES, person=_ROOT)
    return PageName(digest.digest())


@functools.lru_cache(maxsize=1024)
def root_of(fingerprint: Fingerprint) -> PageName:
    """The root without a salt. Workers with equal ones name pages alike: each may look for the other's."""
    return root_name(fingerprint)


def near_salt(salt: str) -> str:
    """Salt for an engine that may answer from converted pages, so that its own cache keeps them from other requests."""
    return salt + _NEAR


def exact_salt(salt: str) -> str:
    """What was given to ``near_salt``: the salt in the names of pages."""
    return salt.removesuffix(_NEAR)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """``tokens`` as unsigned 32-bit little-endian integers. Raises OverflowError on an id outside that range."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def page_name(parent: PageName, tokens: bytes) -> PageName:
    """Name of the page that holds ``tokens`` (packed by ``token_bytes``) after ``parent``.

    The packed length is part of what is hashed, so a partial page never equals a full one.
    """
    page = _PAGE_HASH.copy()
    page.update(parent)  # always NAME_BYTES long, so that it cannot run into the tokens
    page.update(tokens)
    return PageName(page.digest())


def extend_names(names: list[PageName], root: PageName, tokens: Sequence[int], page_tokens: int) -> None:
    """Append to ``names`` (full pages only) the names of the pages of ``tokens`` that are still missing."""
    start = len(names)
    end = len(tokens) // page_tokens
    if start >= end:
        return
    packed = token_bytes(tokens[start * page_tokens : end * page_tokens])
    name: bytes = names[-1] if names else root
    fresh: list[bytes] = []
    copy, append = _PAGE_HASH.copy, fresh.append
    for (page_bytes,) in struct.iter_unpack(f"{4 * page_tokens}s", packed):
        page = copy()  # ``page_name``, without a call for each: this loop is most of what naming costs
        page.update(name)
        page.update(page_bytes)
        name = page.digest()
        append(name)
    names += cast("list[PageName]", fresh)


def name_pages(root: PageName, tokens: Sequence[int], page_tokens: int) -> list[PageName]:
    """Names of all pages of ``tokens``, the partial last one included: ``ceil(len(tokens) / page_tokens)``."""
    names: list[PageName] = []
    extend_names(names, root, tokens, page_tokens)
    rest = tokens[len(names) * page_tokens :]
    if rest:
        names.append(page_name(names[-1] if names else root, token_bytes(rest)))
    return names


class Exact(Value, frozen=True, kw_only=True):
    """A page of one is a page of the other, bit for bit."""


class ByConversion(Value, frozen=True, kw_only=True):
    """Only the elements' type differs: the reader may convert pages of ``dtype``, and answers are no longer equal."""

    dtype: str


class Unlike(Value, frozen=True, kw_only=True):
    """Pages of one mean nothing to the other; ``field`` is the first that differs and cannot be bridged."""

    field: str


def can_exchange(writer: Fingerprint, reader: Fingerprint) -> Exact | ByConversion | Unlike:
    """What ``reader`` can do with pages of ``writer``."""
    differing = [*_differing(writer, reader), *(f"format.{name}" for name in _differing(writer.format, reader.format))]
    convertible = {writer.format.dtype, reader.format.dtype} <= CONVERTIBLE_DTYPES
    unbridged = [field for field in differing if not (convertible and field == "format.dtype")]
    if unbridged:
        return Unlike(field=unbridged[0])
    return ByConversion(dtype=writer.format.dtype) if differing else Exact()


def _differing(one: Fingerprint | PageFormat, other: Fingerprint | PageFormat) -> list[str]:
    return [name for name in _fields(one) if getattr(one, name) != getattr(other, name)]


def _fields(of: Fingerprint | PageFormat) -> list[str]:
    # Not ``msgspec.structs.fields``, which looks annotations up: .2 ms a pair, and a router surveys thousands of them.
    return [name for name in of.__struct_fields__ if name != "format"]


def _text(value: str | int | None) -> bytes:
    """Of a field: one of a kind among the values that the field can have."""
    return b"" if value is None else str(value).encode()


def with_dtype(fingerprint: Fingerprint, dtype: str) -> Fingerprint:
    """The fingerprint of a worker that is like this one but for its KV's type."""
    return msgspec.structs.replace(fingerprint, format=msgspec.structs.replace(fingerprint.format, dtype=dtype))
