"""How far pages have come: the layers that are in, from the first one on without a gap. It reads marks and sets none.

A page is filled layer by layer, so a look costs one mark a page, and one more for each layer that came in since: not
all marks of all pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.store.arena import Arena, Bools, Ints
from kvrelay.types import SlotRef

_NOTHING: Ints = np.empty(0, np.int64)


class Frontier:
    """Pages of one arena by row. A layer that is in counts once all before it are."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._last = arena.format.layers - 1
        self.slots = self.generations = self.layers = _NOTHING
        """``layers``: how many of each page are in, as of the last look."""

    def __repr__(self) -> str:
        return f"<Frontier of {len(self.slots)} pages, {np.count_nonzero(self.layers > self._last)} whole>"

    def extend(self, refs: Sequence[SlotRef], layers: Sequence[int] | None = None) -> None:
        """More pages, in rows behind the present ones; ``layers``: how many of each are known to be in."""
        self.slots = np.concatenate((self.slots, [ref.slot for ref in refs])).astype(np.int64)
        self.generations = np.concatenate((self.generations, [ref.generation for ref in refs])).astype(np.int64)
        fresh = np.zeros(len(refs), np.int64) if layers is None else np.array(layers, np.int64)
        self.layers = np.concatenate((self.layers, fresh))

    def replace(self, row: int, ref: SlotRef) -> None:
        """Another page, from its first layer on."""
        self.slots[row], self.generations[row], self.layers[row] = ref.slot, ref.generation, 0

    def keep(self, rows: Bools) -> None:
        """Forget the other rows; those behind them move up."""
        self.slots, self.generations, self.layers = self.slots[rows], self.generations[rows], self.layers[rows]

    def advance(self) -> Ints:
        """Look again; the rows of which a layer came in."""
        before = self.layers.copy()
        rows = np.flatnonzero(before <= self._last)
        if not len(rows):
            return rows
        rows = self._step(rows)
        if len(rows):
            self._take_whole(rows)
        while len(rows):
            rows = self._step(rows[self.layers[rows] <= self._last])
        return np.flatnonzero(self.layers != before)

    def _step(self, rows: Ints) -> Ints:
        """Those of ``rows`` whose next layer is in; it counts from now on."""
        rows = rows[self._arena.ready(self.slots[rows], self.generations[rows], self.layers[rows])]
        self.layers[rows] += 1
        return rows

    def _take_whole(self, rows: Ints) -> None:
        """Pages of which everything came at once: one look instead of one a layer."""
        rows = rows[self._arena.ready(self.slots[rows], self.generations[rows], self._last)]
        if len(rows):
            rows = rows[self._arena.ready_layers(self.slots[rows], self.generations[rows]).all(axis=0)]
            self.layers[rows] = self._last + 1
