"""Whole pages in and out of an arena, verified. It never returns bytes whose checksums or generation do not hold."""

from __future__ import annotations

import numpy as np
import xxhash

from kvrelay.store.arena import Arena
from kvrelay.types import SlotRef


def write_page(arena: Arena, ref: SlotRef, payload: bytes | memoryview, tokens: int) -> None:
    """Fill a granted slot and publish all its layers. Raises ValueError when ``payload`` has the wrong length."""
    size = tokens * arena.format.token_layer_bytes
    source = memoryview(payload).cast("B")
    if not 0 < tokens <= arena.format.page_tokens or len(source) != size * arena.format.layers:
        raise ValueError(f"a page of {tokens} tokens has {size * arena.format.layers} bytes, not {len(source)}")
    for layer in range(arena.format.layers):
        part = source[layer * size : (layer + 1) * size]
        arena.segment(ref.slot, layer, tokens)[:] = part
        arena.publish(ref, layer, xxhash.xxh3_64_intdigest(part))


def read_page(arena: Arena, ref: SlotRef, tokens: int) -> bytes | None:
    """A copy of a pinned page; None when a layer is missing, a checksum is wrong or the slot moved on."""
    size = tokens * arena.format.token_layer_bytes
    copy = bytearray(size * arena.format.layers)
    target = memoryview(copy)
    for layer in range(arena.format.layers):
        part = target[layer * size : (layer + 1) * size]
        part[:] = arena.segment(ref.slot, layer, tokens)
        if not is_intact(arena, ref, layer, part):
            return None
    return bytes(copy) if arena.is_current(ref) else None


def is_intact(arena: Arena, ref: SlotRef, layer: int, part: memoryview) -> bool:
    """Whether ``part``, a copy of one layer, is what the page's writer published."""
    slots, generations = np.array([ref.slot]), np.array([ref.generation])
    if not arena.ready(slots, generations, layer)[0]:
        return False
    return xxhash.xxh3_64_intdigest(part) == int(arena.checksums(slots, layer)[0])
