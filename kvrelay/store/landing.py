"""One batch on its way in: where each of its segments goes, in pieces that are received and verified one by one.

It must never lead bytes into a slot that does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.store.arena import Arena, Bools, Checksums, Ints, checksums
from kvrelay.store.segments import Columns, run_starts

PIECE_BYTES = 1 << 20
"""Verified at a time: while they are still in the core's cache, and so few that nobody else waits for long."""


@dataclass(slots=True)
class Landing:
    """Segments of one batch by position, in the order of their bytes."""

    arena: Arena
    columns: Columns
    rows: Ints
    """Of their pages among those that are wanted."""
    slots: Ints
    generations: Ints
    sizes: Ints
    taken: Bools
    """They go to their slots; the others are not wanted by anybody (any more), and go to waste."""
    held: Ints
    """Rows of the pages that they go to, each once."""
    verified: int = 0
    """So many from the beginning were looked at."""

    def pieces(self) -> Iterator[slice]:
        """Positions of about ``PIECE_BYTES`` at a time."""
        ends = np.cumsum(self.sizes)
        first = 0
        while first < len(ends):
            limit = (ends[first - 1] if first else 0) + PIECE_BYTES
            end = max(first + 1, int(np.searchsorted(ends, limit, "right")))
            yield slice(first, end)
            first = end

    def views(self, part: slice, waste: Callable[[int], list[memoryview]]) -> list[memoryview]:
        """Memory for the bytes of ``part``."""
        sizes, taken = self.sizes[part], self.taken[part]
        starts = self._run_starts(part)
        totals = np.add.reduceat(sizes, starts)
        if taken.all():
            return self.arena.pieces(self._offsets(part)[starts], totals)
        views: list[memoryview] = []
        for offset, total, is_taken in zip(self._offsets(part)[starts], totals, taken[starts], strict=True):
            views += self.arena.pieces(offset[None], total[None]) if is_taken else waste(int(total))
        return views

    @property
    def runs(self) -> int:
        """Into how many pieces of memory without a gap all of it goes."""
        return len(self._run_starts(slice(None)))

    def _run_starts(self, part: slice) -> Ints:
        slots = np.where(self.taken[part], self.slots[part], -1)
        return run_starts(slots, self.columns.layers[part], self.sizes[part], self._step)

    def fill(self, raw: memoryview, *, are_rounded: bool) -> None:
        """Copy decoded bytes to where they belong. Rounded ones get the checksums that they have now."""
        if are_rounded:
            self.columns = self.columns._replace(checksums=self._checksums_of(raw))
        here = self.arena.pieces(self._offsets(slice(None)), self.sizes)
        starts = np.cumsum(self.sizes) - self.sizes
        for at in np.flatnonzero(self.taken).tolist():
            here[at][:] = raw[starts[at] : starts[at] + self.sizes[at]]

    def _checksums_of(self, raw: memoryview) -> Checksums:
        starts, shares = np.cumsum(self.sizes) - self.sizes, self.sizes // self.columns.shards
        found = [
            checksums(raw[start : start + size], share)
            for start, size, share in zip(starts.tolist(), self.sizes.tolist(), shares.tolist(), strict=True)
        ]
        return np.array(found, np.uint64)

    def digests(self, at: Ints) -> Checksums:
        """``[segments, shards]``: checksums of the segments at these positions, as they lie in their slots."""
        shards = self.columns.shards
        shares = self.sizes[at] // shards
        offsets = self._offsets(at)[:, None] + shares[:, None] * np.arange(shards)
        return self.arena.digests(offsets.ravel(), np.repeat(shares, shards)).reshape(-1, shards)

    @property
    def _step(self) -> int:
        return self.arena.format.segment_bytes

    def _offsets(self, at: Ints | slice) -> Ints:
        offsets: Ints = self.slots[at] * self.arena.stride + self.columns.layers[at] * self._step
        return offsets
