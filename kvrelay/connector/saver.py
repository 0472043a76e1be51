"""Copies pages from the engine's blocks into the arena, layer by layer, in the forward thread: it never waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from kvrelay.connector.layout import KVLayout, token_slots
from kvrelay.connector.plan import PageCopy, SaveJob
from kvrelay.connector.staging import arena_layer
from kvrelay.store.arena import Arena, Bools, Ints
from kvrelay.types import WHOLE, Shard, SlotRef


@dataclass
class _Full:
    """Whole pages of a step: one gather and one scatter a layer for all of them."""

    numbers: Ints
    generations: Ints
    blocks: torch.Tensor
    offsets: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        return torch.from_numpy(self.numbers)

    def only(self, alive: Bools) -> _Full:
        """The pages whose slots are still theirs; for one layer's copy, after its gather."""
        return _Full(self.numbers[alive], self.generations[alive], self.blocks, self.offsets)


@dataclass
class _Part:
    """One partial page: its own gather, because its segment is shorter."""

    page: PageCopy
    blocks: torch.Tensor
    offsets: torch.Tensor


class StepSaver:
    """All pages that one step writes, with their token positions resolved once for all layers."""

    def __init__(self, arena: Arena, layout: KVLayout, jobs: list[SaveJob], shard: Shard = WHOLE) -> None:
        """``shard``: the heads of the model that are this engine's blocks, and this rank's to write."""
        self._arena = arena
        self._layout = layout
        self._format = arena.format
        self._shard = shard
        self._heads = shard.heads(arena.format.kv_heads)
        located = [(job, page) for job in jobs for page in job.pages if _is_current(arena, page)]
        full = [(job, page) for job, page in located if page.tokens == self._format.page_tokens]
        self._full = self._resolve_full(full)
        self._parts = [
            _Part(page, *layout.place(*token_slots(job.blocks, page.start, page.tokens, layout.block_tokens)))
            for job, page in located
            if page.tokens < self._format.page_tokens
        ]

    def __repr__(self) -> str:
        whole = 0 if self._full is None else len(self._full.numbers)
        return f"<StepSaver {whole} whole pages, {len(self._parts)} partial>"

    def _resolve_full(self, located: list[tuple[SaveJob, PageCopy]]) -> _Full | None:
        if not located:
            return None
        size = self._layout.block_tokens
        places = [token_slots(job.blocks, page.start, page.tokens, size) for job, page in located]
        numbers = np.array([page.slot for _, page in located], dtype=np.int64)
        generations = np.array([page.generation for _, page in located], dtype=np.int64)
        blocks, offsets = self._layout.place(*(torch.cat(part) for part in zip(*places, strict=True)))
        return _Full(numbers, generations, blocks, offsets)

    def save(self, layer: int, kv_layer: torch.Tensor) -> None:
        """Copy one layer of every page, then mark it ready."""
        self.publish(layer, self.stage(kv_layer))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and elements of what ``stage`` gives."""
        each = 2 * self._layout.heads * self._layout.head_dim
        whole = [(len(self._full.numbers), each * self._format.page_tokens)] if self._full is not None else []
        return whole + [(1, each * part.page.tokens) for part in self._parts]

    def stage(self, kv_layer: torch.Tensor) -> list[torch.Tensor]:
        """One layer in canonical order, where ``kv_layer`` is: whole pages as rows, then each partial one as a row."""
        runs = [] if self._full is None else [(self._full.blocks, self._full.offsets, len(self._full.numbers))]
        runs += [(part.blocks, part.offsets, 1) for part in self._parts]
        staged = []
        for blocks, offsets, pages in runs:
            key, value = self._layout.gather(kv_layer, blocks, offsets)
            staged.append(canonical(key, value, pages).view(pages, -1))
        return staged

    def publish(self, layer: int, staged: list[torch.Tensor]) -> None:
        """Copy what was staged, and is in host memory now, into the arena; then mark it ready."""
        rest = list(staged)
        if self._full is not None:
            self._publish_full(self._full, layer, rest.pop(0))
        for part, row in zip(self._parts, rest, strict=True):
            self._publish_part(part.page, layer, row[0])

    def _publish_full(self, full: _Full, layer: int, staged: torch.Tensor) -> None:
        # Of the source, not of the arena: bytes that another writes into the slot must not be vouched for.
        raw = staged.view(torch.uint8).numpy()
        sums = np.array([xxhash.xxh3_64_intdigest(row) for row in raw], dtype=np.uint64)
        alive = self._arena.current(full.numbers, full.generations)
        if not alive.all():
            staged, full, sums = staged[torch.from_numpy(alive)], full.only(alive), sums[alive]
        each = staged.shape[1] // (self._heads.stop - self._heads.start)
        run = slice(self._heads.start * each, self._heads.stop * each)
        arena_layer(self._arena, layer)[:, run].index_copy_(0, full.slots, staged)
        self._arena.publish_many(full.numbers, full.generations, layer, sums, self._shard)

    def _publish_part(self, page: PageCopy, layer: int, staged: torch.Tensor) -> None:
        checksum = xxhash.xxh3_64_intdigest(staged.view(torch.uint8).numpy())
        if _is_current(self._arena, page):
            each = page.tokens * self._format.token_layer_bytes // self._format.kv_heads
            segment = self._arena.segment(page.slot, layer, page.tokens)
            run = segment[self._heads.start * each : self._heads.stop * each]
            torch.frombuffer(run, dtype=staged.dtype).copy_(staged)
            self._arena.publish(SlotRef(page.slot, page.generation), layer, checksum, self._shard)


def _is_current(arena: Arena, page: PageCopy) -> bool:
    return arena.is_current(SlotRef(page.slot, page.generation))


def canonical(key: torch.Tensor, value: torch.Tensor, pages: int) -> torch.Tensor:
    """``[pages, kv_head, K|V, token, head_dim]`` of keys and values ``[pages * token, kv_head, head_dim]``."""
    _, heads, head_dim = key.shape
    parts = [part.view(pages, -1, heads, head_dim).transpose(1, 2) for part in (key, value)]
    return torch.stack(parts, dim=2)
