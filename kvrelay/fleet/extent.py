"""Page names that came one after the other, side by side in memory, each with its mask of places. It must never be
trusted to be a chain: who walks along it compares names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import ne

from kvrelay.types import PageName

MAX_PAGES = 256
"""A prompt crosses few of them, and a page is found inside one within 1 us."""


class Extent:
    """Up to ``MAX_PAGES`` slots. A page that is nowhere any more leaves a hole, which is not filled again."""

    __slots__ = ("live", "masks", "names")

    def __init__(self) -> None:
        self.names: list[PageName | None] = []
        self.masks: list[int] = []
        self.live = 0

    def __repr__(self) -> str:
        return f"<Extent {self.live}/{len(self.names)} pages>"

    @property
    def room(self) -> int:
        return MAX_PAGES - len(self.names)

    def append(self, names: Sequence[PageName], mask: int) -> None:
        """Add pages that are in no extent."""
        self.names.extend(names)
        self.masks.extend([mask] * len(names))
        self.live += len(names)

    def follows(self, offset: int, names: list[PageName], begin: int) -> int:
        """How many of ``names`` from ``begin`` on stand here from ``offset`` on, one after the other."""
        ours = self.names[offset : offset + len(names) - begin]
        theirs = names[begin : begin + len(ours)]
        if ours == theirs:  # a loop of C that touches memory in order
            return len(ours)
        return next(compress(count(), map(ne, ours, theirs)))

    def drop(self, offset: int) -> None:
        """The page in this slot is nowhere any more."""
        self.names[offset] = None
        self.masks[offset] = 0
        self.live -= 1
