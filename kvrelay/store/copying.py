"""Whole pages in and out of an arena, verified. It never returns bytes whose checksums or generation do not hold."""

from __future__ import annotations

import numpy as np
import xxhash

from kvrelay.errors import Lost
from kvrelay.store.arena import Arena
from kvrelay.types import SlotRef


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
    for layer in range(arena.format.layers):
        part = source[layer * size : (layer + 1) * size]
        arena.segment(ref.slot, layer, tokens)[:] = part
        # After the copy, while the bytes are in the cache; of the source, so that a bad copy is found.
        arena.publish(ref, layer, xxhash.xxh3_64_intdigest(part))


def read_page(arena: Arena, ref: SlotRef, tokens: int) -> bytes | None:
    """A copy of a pinned page; None when a layer is missing, a checksum is wrong or the slot moved on."""
    layers = range(arena.format.layers)
    copy = b"".join(arena.segment(ref.slot, layer, tokens) for layer in layers)
    return copy if is_intact(arena, ref, copy) and arena.is_current(ref) else None


def is_intact(arena: Arena, ref: SlotRef, copy: bytes) -> bool:
    """Whether ``copy``, all layers of one page, is what the page's writer published."""
    slots, generations = np.array([ref.slot]), np.array([ref.generation])
    if not arena.ready_layers(slots, generations).all():
        return False
    layers = np.arange(arena.format.layers)
    sums: list[int] = arena.checksums(np.full(len(layers), ref.slot), layers).tolist()
    size = len(copy) // len(sums)
    view = memoryview(copy)
    return all(
        xxhash.xxh3_64_intdigest(view[layer * size : (layer + 1) * size]) == checksum
        for layer, checksum in enumerate(sums)
    )
