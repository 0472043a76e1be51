"""Pages of one load, a layer at a time: copied out of the arena, verified there, and cut to the rank's heads.

It must never hand out a byte that was not verified after the copy: nothing that happens to the arena meanwhile can get
in between. A writer's run of heads has one checksum, so a run is copied whole even when the rank wants a part of it.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.plan import PageCopy
from kvrelay.store.arena import Arena, Bools, Ints, checksums
from kvrelay.types import PageFormat, Shard


class Staging:
    """The pages of one load. ``count``: the first so many of them; the others are given up."""

    def __init__(self, arena: Arena, pages: list[PageCopy], heads: RankHeads) -> None:
        self._arena = arena
        self._format = arena.format
        self._pages = pages
        self._heads = heads
        self._numbers: Ints = np.array([page.slot for page in pages], dtype=np.int64)
        self._generations: Ints = np.array([page.generation for page in pages], dtype=np.int64)
        self._shards: Ints = np.array([page.shards for page in pages], dtype=np.int64)
        total = self._format.kv_heads
        self._runs = {page.shards: heads.runs(page.shards, total) for page in pages}
        self._first = min(runs.start * total // shards for shards, runs in self._runs.items())
        self._stop = max(runs.stop * total // shards for shards, runs in self._runs.items())
        """Heads that are copied: all runs that hold one of the rank's."""
        self._whole: torch.Tensor = torch.empty(0)
        self._tail: torch.Tensor | None = None
        self._bytes = self._tail_bytes = memoryview(b"")
        """Of both, as they lie there: to make a view of each page anew takes twice as long as its checksum."""
        self._token_head_bytes = self._format.token_layer_bytes // total

    def __repr__(self) -> str:
        return f"<Staging {len(self._pages)} pages, heads {self._first} to {self._stop - 1}>"

    def outside(self) -> Bools:
        """Which pages are said to lie in slots that the arena does not have."""
        return (self._numbers < 0) | (self._numbers >= self._arena.slots)

    def lost(self, count: int) -> Bools:
        """Which pages will never be whole: their writer failed, or their slot was given away."""
        return self._arena.lost(self._numbers[:count], self._generations[:count])

    def ready(self, count: int, layer: int) -> Bools:
        """Which pages hold every run of ``layer`` that the rank reads."""
        in_place = np.ones(count, dtype=np.bool_)
        for shards, runs in self._runs.items():
            which = np.flatnonzero(self._shards[:count] == shards) if len(self._runs) > 1 else np.arange(count)
            slots, generations = self._numbers[which], self._generations[which]
            for run in runs:
                in_place[which] &= self._arena.ready(slots, generations, layer, Shard(run, shards))
        return in_place

    def may_be_in(self, index: int, layer: int) -> bool:
        """Whether one mark of those that ``ready`` looks for is there: much cheaper, and not the whole truth."""
        slot, generation = int(self._numbers[index]), int(self._generations[index])
        shards = self._pages[index].shards
        head = Shard(self._runs[shards].start, shards).heads(self._format.kv_heads).start
        return self._arena.is_marked(slot, generation, layer, head)

    def copy(self, count: int, layer: int) -> None:
        """Copy ``layer`` of the pages into private memory."""
        pages = self._pages[:count]
        tail = pages[-1] if pages and pages[-1].tokens < self._format.page_tokens else None
        whole = torch.from_numpy(self._numbers[: count - (tail is not None)])
        run = slice(self._first * self._head_elements, self._stop * self._head_elements)
        self._whole = torch.index_select(arena_layer(self._arena, layer)[:, run], 0, whole)
        self._tail = None if tail is None else self._copy_tail(tail, layer)
        self._bytes = _flat(self._whole)
        self._tail_bytes = self._bytes if self._tail is None else _flat(self._tail)

    def _copy_tail(self, page: PageCopy, layer: int) -> torch.Tensor:
        each = self._each(page)
        segment = self._arena.segment(page.slot, layer, page.tokens)[self._first * each : self._stop * each]
        return torch.frombuffer(segment, dtype=page_dtype(self._format)).clone()

    @property
    def _head_elements(self) -> int:
        return 2 * self._format.page_tokens * self._format.head_dim

    def first_bad(self, count: int, layer: int) -> int | None:
        """The first page whose copy is not what its writers published; None when all are."""
        slots = self._numbers[:count]
        published = {shards: self._arena.checksums(slots, layer, shards).tolist() for shards in self._runs}
        for index, page in enumerate(self._pages[:count]):
            runs = self._runs[page.shards]
            if self._sums(index, page) != published[page.shards][index][runs.start : runs.stop]:
                return index
        return None

    def _sums(self, index: int, page: PageCopy) -> list[int]:
        """Checksums of one copied page's runs."""
        width, runs, each = self._format.kv_heads // page.shards, self._runs[page.shards], self._each(page)
        is_tail = index >= len(self._whole)
        raw, at = (self._tail_bytes, 0) if is_tail else (self._bytes, index * (self._stop - self._first) * each)
        begin, end = (at + (head * width - self._first) * each for head in (runs.start, runs.stop))
        return checksums(raw[begin:end], width * each)

    def _each(self, page: PageCopy) -> int:
        """Bytes of one head of one layer."""
        return page.tokens * self._token_head_bytes

    def keys_values(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the copied pages' tokens, each ``[token, kv_head, head_dim]`` of the rank's heads."""
        whole = min(count, len(self._whole))
        key, value = self._cut(self._whole[:whole], self._format.page_tokens)
        if self._tail is None or count == whole:
            return key, value
        tail = self._cut(self._tail[None], self._pages[whole].tokens)
        return torch.cat((key, tail[0])), torch.cat((value, tail[1]))

    def _cut(self, copies: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads, dim, skip = self._stop - self._first, self._format.head_dim, self._heads.first - self._first
        shaped = copies.view(len(copies), heads, 2, tokens, dim)[:, skip : skip + self._heads.count].transpose(1, 3)
        key, value = (shaped[:, :, which].reshape(-1, self._heads.count, dim) for which in range(2))
        return key, value


def _flat(copies: torch.Tensor) -> memoryview:
    return memoryview(copies.view(torch.uint8).numpy().reshape(-1))


def page_dtype(format: PageFormat) -> torch.dtype:
    """The element type of a page's bytes."""
    dtype = getattr(torch, format.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def arena_layer(arena: Arena, layer: int) -> torch.Tensor:
    """One layer's segments of all slots as ``[slots, elements]``, sharing the arena's memory."""
    start = layer * arena.format.segment_bytes
    rows = torch.from_numpy(arena.data)[:, start : start + arena.format.segment_bytes]
    return rows.view(page_dtype(arena.format))
