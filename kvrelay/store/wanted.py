"""Pages of one push that were asked for: which of their bytes are still to come, to be verified, or coming now.

It must never say of a segment twice that it is to come: what is verified is not written again. Columns, because a batch
is about hundreds of pages at once; a page gets a row when it is asked for, and keeps it.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvrelay.store.arena import Bools, Ints
from kvrelay.store.page import Page
from kvrelay.store.segments import tally

_FIRST_ROWS = 64

S = TypeVar("S", bound=np.generic)


class Wanted:
    """Rows of pages. Each is held (pinned by its owner) until it is let go and no batch is coming into its slot."""

    def __init__(self, names: int, layers: int) -> None:
        self.pages: list[Page | None] = [None]
        """Row 0 stands for all pages that were not asked for: of those nothing is to come."""
        self._row_of: Ints = np.zeros(names, np.int64)
        """Row of each name of the transfer, by position."""
        self.slots, self.shards, self._unverified, self._landing = np.zeros((4, 1), np.int64)
        self.generations: Ints = np.full(1, -1, np.int64)
        self.is_open: Bools = np.zeros(1, np.bool_)
        """Not let go yet."""
        self._to_come: Bools = np.zeros((1, layers), np.bool_)

    def __repr__(self) -> str:
        return f"<Wanted {len(self)} of {len(self.pages) - 1} pages>"

    def __len__(self) -> int:
        return int(np.count_nonzero(self.is_open))

    def add(self, indices: list[int], pages: list[Page]) -> None:
        """These, all of equally many shards, were asked for; none of them before."""
        first, end = len(self.pages), len(self.pages) + len(pages)
        self._reserve(end)
        self.pages += pages
        self._row_of[indices] = np.arange(first, end)
        refs = [page.ref for page in pages]
        self.slots[first:end] = [ref.slot for ref in refs]
        self.generations[first:end] = [ref.generation for ref in refs]
        self.shards[first:end] = pages[0].shards if pages else 0
        self._unverified[first:end] = self._to_come.shape[1]
        self.is_open[first:end] = self._to_come[first:end] = True

    def _reserve(self, rows: int) -> None:
        if rows <= len(self.slots):
            return
        more = max(rows, 2 * len(self.slots), _FIRST_ROWS) - len(self.slots)
        self.slots, self.generations, self.shards = (
            _longer(each, more) for each in (self.slots, self.generations, self.shards)
        )
        self._unverified, self._landing = _longer(self._unverified, more), _longer(self._landing, more)
        self.is_open, self._to_come = _longer(self.is_open, more), _longer(self._to_come, more)

    def rows(self, indices: Ints) -> Ints:
        """Rows of pages by their position among the names; 0 where one was not asked for."""
        found: Ints = self._row_of[indices]
        return found

    @property
    def open_rows(self) -> Ints:
        return np.flatnonzero(self.is_open)

    # ------------------------------------------------------------ batches

    def take(self, rows: Ints, layers: Ints) -> Bools:
        """Which of these segments, each named once, are to come. They come now."""
        taken: Bools = self._to_come[rows, layers]
        self._to_come[rows, layers] = False
        return taken

    def put_back(self, rows: Ints, layers: Ints) -> None:
        """What came now did not come through."""
        self._to_come[rows, layers] = self.is_open[rows]

    def hold(self, rows: Ints) -> None:
        """A batch is coming into the slots of these, each named once."""
        self._landing[rows] += 1

    def release(self, rows: Ints) -> list[Page]:
        """A batch is through; the pages that nothing holds any more."""
        self._landing[rows] -= 1
        return self._free(rows[~self.is_open[rows]])

    def verified(self, rows: Ints) -> Ints:
        """A segment of each of ``rows`` was verified; the rows of pages that moved, each once."""
        moved, counts = tally(rows)
        self._unverified[moved] -= counts
        return moved

    def layers_in(self, rows: Ints) -> Ints:
        """How many layers of each page were verified."""
        counts: Ints = self._to_come.shape[1] - self._unverified[rows]
        return counts

    def let_go(self, rows: Ints) -> list[Page]:
        """Nothing more is expected of these, still open; the pages that nothing holds any more."""
        self.is_open[rows] = self._to_come[rows] = False
        return self._free(rows)

    def _free(self, rows: Ints) -> list[Page]:
        return self.of(rows[self._landing[rows] == 0])

    def of(self, rows: Ints) -> list[Page]:
        """The pages in ``rows``."""
        return [page for row in rows.tolist() if (page := self.pages[row]) is not None]


def _longer(column: npt.NDArray[S], more: int) -> npt.NDArray[S]:
    return np.concatenate((column, np.zeros((more, *column.shape[1:]), column.dtype)))
