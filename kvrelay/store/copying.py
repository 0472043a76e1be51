"""Whole pages in and out of an arena, verified. It never returns bytes whose checksums or generation do not hold."""

from __future__ import annotations

import numpy as np

from kvrelay.errors import Lost
from kvrelay.store.arena import Arena, checksums
from kvrelay.types import SlotRef

BLOCK_BYTES = 128 << 10
"""Copied at a time: a core's cache still has it when its checksums are computed."""


def write_page(arena: Arena, ref: SlotRef, payload: bytes | memoryview, tokens: int) -> None:
    """Fill a granted slot and publish all its layers.

    Raises ``Lost`` when the slot was granted in another arena, ValueError when ``payload`` has the wrong length.
    """
    size = tokens * arena.format.token_layer_bytes
    source = memoryview(payload).cast("B")
    if not 0 < tokens <= arena.format.page_tokens or len(source) != size * arena.format.layers:
        raise ValueError(f"a page of {tokens} tokens has {size * arena.format.layers} bytes, not {len(source)}")
    if not arena.is_current(ref):
        raise Lost("the store was restarted meanwhile; put the page again")
    sums: list[int] = []
    step = max(1, BLOCK_BYTES // size)
    for first in range(0, arena.format.layers, step):
        layers = list(range(first, min(first + step, arena.format.layers)))
        block = source[first * size : (first + len(layers)) * size]
        _fill(arena.views(ref.slot, layers, tokens), block)
        sums += checksums(block, size)  # of the source, so that a bad copy is found
    each = np.arange(arena.format.layers)
    arena.publish_segments(
        np.full_like(each, ref.slot), np.full_like(each, ref.generation), each, np.array(sums, np.uint64)[:, None]
    )


def _fill(views: list[memoryview], source: memoryview) -> None:
    offset = 0
    for view in views:
        view[:] = source[offset : offset + len(view)]
        offset += len(view)


def read_page(arena: Arena, ref: SlotRef, tokens: int, shards: int = 1) -> bytes | None:
    """A copy of a pinned page; None when a layer is missing, a checksum is wrong or the slot moved on."""
    copy = b"".join(arena.views(ref.slot, list(range(arena.format.layers)), tokens))
    return copy if is_intact(arena, ref, copy, shards) and arena.is_current(ref) else None


def read_page_into(arena: Arena, ref: SlotRef, tokens: int, target: memoryview, shards: int = 1) -> bool:
    """``read_page`` into the caller's memory; False when it holds nothing usable. Raises ValueError on its length."""
    offset = 0
    for view in arena.views(ref.slot, list(range(arena.format.layers)), tokens):
        target[offset : offset + len(view)] = view
        offset += len(view)
    return is_intact(arena, ref, target[:offset], shards) and arena.is_current(ref)


def is_intact(arena: Arena, ref: SlotRef, copy: bytes | memoryview, shards: int) -> bool:
    """Whether ``copy``, all layers of one page, is what the page's ``shards`` writers published."""
    if not arena.is_whole(ref):
        return False
    published = arena.page_checksums(ref.slot, shards)
    return checksums(memoryview(copy), len(copy) // len(published)) == published
