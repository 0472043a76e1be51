"""One batch on its way in: where each of its segments goes, in pieces that are received and verified one by one.

It must never lead bytes into a slot that does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvrelay.errors import Malformed
from kvrelay.store.arena import Arena, Bools, Ints, checksums
from kvrelay.store.segments import Columns, begins_run

PIECE_BYTES = 4 << 20
"""Received, or verified, at a time: so little that nobody waits for long."""


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
    offsets: Ints = field(init=False)
    """From the beginning of the first slot."""
    ends: Ints = field(init=False)
    """Where they end in the payload."""
    _begins: Bools = field(init=False)
    """A run of memory without gaps begins with it, or the first segment that goes to waste."""

    def __post_init__(self) -> None:
        step = self.arena.format.segment_bytes
        self.offsets = self.slots * self.arena.stride + self.columns.layers * step
        self.ends = np.cumsum(self.sizes)
        self._begins = begins_run(np.where(self.taken, self.slots, -1), self.columns.layers, self.sizes, step)

    @property
    def runs(self) -> int:
        """Into how many pieces of memory without a gap all of it goes."""
        return int(np.count_nonzero(self._begins))

    def pieces(self) -> Iterator[slice]:
        """Positions of about ``PIECE_BYTES`` at a time."""
        first = begin = 0
        while first < len(self.ends):
            end = max(first + 1, int(np.searchsorted(self.ends, begin + PIECE_BYTES, "right")))
            yield slice(first, end)
            first, begin = end, int(self.ends[end - 1])

    def taken_in(self, part: slice) -> Ints | slice:
        """Positions of the segments of ``part`` that go to their slots; itself where all do, which is the rule."""
        taken = self.taken[part]
        return part if taken.all() else part.start + np.flatnonzero(taken)

    def positions(self, at: Ints | slice) -> Ints:
        """The same, one by one."""
        return np.arange(at.start, at.stop) if isinstance(at, slice) else at

    def size_bytes(self, part: slice) -> int:
        """Bytes of a piece, decoded."""
        return int(self.ends[part.stop - 1] - self.ends[part.start] + self.sizes[part.start])

    def views(self, part: slice, waste: Callable[[int], list[memoryview]]) -> list[memoryview]:
        """Memory for the bytes of ``part``."""
        begins = self._begins[part].copy()
        begins[0] = True
        starts = np.flatnonzero(begins)
        totals = np.add.reduceat(self.sizes[part], starts)
        places = self.arena.pieces(self.offsets[part][starts], totals)
        is_taken = self.taken[part][starts]
        if is_taken.all():
            return places
        views: list[memoryview] = []
        for place, total, is_wanted in zip(places, totals.tolist(), is_taken.tolist(), strict=True):
            views += [place] if is_wanted else waste(total)
        return views

    def fill(self, raw: memoryview, *, are_rounded: bool) -> None:
        """Copy decoded bytes to where they belong. Rounded ones get the checksums that they have now."""
        parts = [raw[end - size : end] for size, end in zip(self.sizes.tolist(), self.ends.tolist(), strict=True)]
        if are_rounded:
            shards = self.columns.shards
            sums = np.array([checksums(part, len(part) // shards) for part in parts], np.uint64)
            self.columns = self.columns._replace(checksums=sums)
        at = np.flatnonzero(self.taken)
        for place, index in zip(self.arena.pieces(self.offsets[at], self.sizes[at]), at.tolist(), strict=True):
            place[:] = parts[index]

    def are_sound(self, at: Ints | slice) -> Bools:
        """Whether the segments at these positions, as they lie in their slots, are what their checksums say."""
        shards = self.columns.shards
        offsets, shares = self.offsets[at], self.sizes[at] // shards
        if shards > 1:
            offsets = (offsets[:, None] + shares[:, None] * np.arange(shards)).ravel()
            shares = np.repeat(shares, shards)
        found = self.arena.digests(offsets, shares).reshape(-1, shards)
        sound: Bools = (found == self.columns.checksums[at]).all(axis=1)
        return sound


def check_size(size_bytes: int, most_bytes: int) -> None:
    """Before anything is made for a payload. Raises ``Malformed``."""
    if not 0 < size_bytes <= most_bytes:
        raise Malformed(f"a payload of {size_bytes} bytes is not taken")
