"""Pages that a peer asked for with one answer, and how many layers of each were sent. It holds no pins.

It must never give a layer out twice, nor one that is not in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.store.arena import Arena, Ints, SlotState
from kvrelay.store.batch import Places
from kvrelay.store.frontier import Frontier
from kvrelay.store.page import Page
from kvrelay.types import SlotRef


class Portion(NamedTuple):
    """Layers of pages to send now."""

    pages: Ints
    """Positions among the names of the transfer."""
    places: Places


class Cohort:
    """All of equally many shards, in the order in which they are sent."""

    def __init__(self, arena: Arena, indices: Sequence[int], pages: Sequence[Page], lent: Sequence[SlotRef]) -> None:
        self.shards = pages[0].shards
        self._indices = np.array(indices, np.int64)
        self._sizes = np.array([page.tokens for page in pages], np.int64) * arena.format.token_layer_bytes
        self._frontier = Frontier(arena)
        layers = arena.format.layers
        whole = [layers if page.state is SlotState.COMPLETE else 0 for page in pages]
        self._frontier.extend([page.ref for page in pages], whole)
        self._sent = np.zeros(len(pages), np.int64)
        self._left = len(pages) * arena.format.layers
        self._targets, self._generations = np.full((2, len(pages)), -1, np.int64)
        if lent:
            self._targets[:], self._generations[:] = zip(*((ref.slot, ref.generation) for ref in lent), strict=True)

    def __repr__(self) -> str:
        return f"<Cohort of {len(self._sent)} pages, {self._left} segments left>"

    @property
    def is_through(self) -> bool:
        """Nothing is left to be sent."""
        return self._left == 0

    def replace(self, index: int, ref: SlotRef) -> None:
        """The page at ``index``, if it is one of these, is taken from another slot; nothing of it was sent."""
        for row in np.flatnonzero(self._indices == index).tolist():
            self._frontier.replace(row, ref)

    def take(self, limit: int) -> Portion:
        """Up to ``limit`` segments that are in and were not sent. They count as sent from now on."""
        self._frontier.advance()
        counts = self._frontier.layers - self._sent
        rows = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        layers = (np.arange(len(rows)) - firsts[rows] + self._sent[rows])[:limit]
        rows = rows[:limit]
        self._sent += np.bincount(rows, minlength=len(counts))
        self._left -= len(rows)
        places = Places(
            self._frontier.slots[rows], layers, self._sizes[rows], self._targets[rows], self._generations[rows]
        )
        return Portion(self._indices[rows], places)
