"""Copies pages from the engine's blocks into the arena, layer by layer, in the forward thread: it never waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from kvrelay.connector.layout import BlockLayout, token_slots
from kvrelay.connector.plan import PageCopy, SaveJob
from kvrelay.store.arena import Arena
from kvrelay.types import SlotRef


@dataclass
class _Full:
    """Whole pages of a step: one gather and one scatter a layer for all of them."""

    slots: torch.Tensor
    numbers: np.ndarray
    generations: np.ndarray
    blocks: torch.Tensor
    offsets: torch.Tensor


@dataclass
class _Part:
    """One partial page: its own gather, because its segment is shorter."""

    page: PageCopy
    blocks: torch.Tensor
    offsets: torch.Tensor


class StepSaver:
    """All pages that one step writes, with their token positions resolved once for all layers."""

    def __init__(self, arena: Arena, layout: BlockLayout, jobs: list[SaveJob]) -> None:
        self._arena = arena
        self._layout = layout
        self._format = arena.format
        located = [(job, page) for job in jobs for page in job.pages if _is_current(arena, page)]
        self.slots = [SlotRef(page.slot, page.generation) for _, page in located]
        full = [(job, page) for job, page in located if page.tokens == self._format.page_tokens]
        self._full = self._resolve_full(full)
        self._parts = [
            _Part(page, *token_slots(job.blocks, page.start, page.tokens, layout.block_tokens))
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
        blocks, offsets = (torch.cat(part) for part in zip(*places, strict=True))
        return _Full(torch.from_numpy(numbers), numbers, generations, blocks, offsets)

    def save(self, layer: int, kv_layer: torch.Tensor) -> None:
        """Copy one layer of every page, then mark it ready."""
        if self._full is not None:
            self._save_full(self._full, layer, kv_layer)
        for part in self._parts:
            self._save_part(part, layer, kv_layer)

    def _save_full(self, full: _Full, layer: int, kv_layer: torch.Tensor) -> None:
        key, value = self._layout.gather(kv_layer, full.blocks, full.offsets)
        rows = arena_layer(self._arena, layer, kv_layer.dtype)
        half = rows.shape[1] // 2
        pages = len(full.numbers)
        rows[:, :half].index_copy_(0, full.slots, key.reshape(pages, half))
        rows[:, half:].index_copy_(0, full.slots, value.reshape(pages, half))
        size = self._format.page_tokens
        sums = [xxhash.xxh3_64_intdigest(self._arena.segment(slot, layer, size)) for slot in full.numbers]
        self._arena.publish_many(full.numbers, full.generations, layer, np.array(sums, dtype=np.uint64))

    def _save_part(self, part: _Part, layer: int, kv_layer: torch.Tensor) -> None:
        page = part.page
        segment = self._arena.segment(page.slot, layer, page.tokens)
        target = torch.frombuffer(segment, dtype=kv_layer.dtype)
        key, value = self._layout.gather(kv_layer, part.blocks, part.offsets)
        half = target.numel() // 2
        target[:half] = key.reshape(-1)
        target[half:] = value.reshape(-1)
        self._arena.publish(SlotRef(page.slot, page.generation), layer, xxhash.xxh3_64_intdigest(segment))


def _is_current(arena: Arena, page: PageCopy) -> bool:
    return arena.is_current(SlotRef(page.slot, page.generation))


def arena_layer(arena: Arena, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """One layer's segments of all slots as ``[slots, elements]`` of ``dtype``, sharing the arena's memory."""
    start = layer * arena.format.segment_bytes
    rows = torch.from_numpy(arena.data)[:, start : start + arena.format.segment_bytes]
    return rows.view(dtype)
