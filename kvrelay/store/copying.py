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
    if tokens == arena.format.page_tokens:
        arena.whole(ref.slot)[:] = source
    else:
        for layer in range(arena.format.layers):
            arena.segment(ref.slot, layer, tokens)[:] = source[layer * size : (layer + 1) * size]
    # Of the source, so that a bad copy is found.
    arena.publish_page(ref, _checksums(source, arena.format.layers))


def read_page(arena: Arena, ref: SlotRef, tokens: int) -> bytes | None:
    """A copy of a pinned page; None when a layer is missing, a checksum is wrong or the slot moved on."""
    if tokens == arena.format.page_tokens:
        copy = bytes(arena.whole(ref.slot))
    else:
        copy = b"".join(arena.segment(ref.slot, layer, tokens) for layer in range(arena.format.layers))
    return copy if is_intact(arena, ref, copy) and arena.is_current(ref) else None


def is_intact(arena: Arena, ref: SlotRef, copy: bytes) -> bool:
    """Whether ``copy``, all layers of one page, is what the page's writer published."""
    if not arena.ready_layers(np.array([ref.slot]), np.array([ref.generation])).all():
        return False
    layers = np.arange(arena.format.layers)
    published: list[int] = arena.checksums(np.full(len(layers), ref.slot), layers).tolist()
    return _checksums(memoryview(copy), len(layers)) == published


def _checksums(page: memoryview, layers: int) -> list[int]:
    size = len(page) // layers
    return [xxhash.xxh3_64_intdigest(page[start : start + size]) for start in range(0, len(page), size)]
