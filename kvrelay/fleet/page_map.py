"""Which places hold which pages: one bit mask a page. It must never show a page at a place that was closed.

A place is a tier of one incarnation of a holder. A dict finds the extent in which a page stands; the pages that came
with it stand next to it, so that a prompt is found with a look into the dict for each extent and not for each page: in
an index of a million pages every such look waits for memory (85 us for 128 pages, 6 us so). Equal masks are one object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvrelay.fleet.extent import Extent
from kvrelay.types import PageName

MAX_SHARED_MASKS = 1 << 16
SLACK_SLOTS = 16_384
"""Holes beyond one a page that are not worth moving pages for."""


class Run(NamedTuple):
    """Pages from the last run's end up to ``end`` are at the places of ``mask``."""

    end: int
    mask: int


class Span(NamedTuple):
    """Names from ``begin`` to ``end`` stand in ``extent`` from ``offset`` on; None: they are unknown."""

    begin: int
    end: int
    extent: Extent | None
    offset: int


class PageMap:
    """Page names and the places that hold them; ``limit`` names at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.turned_away = 0
        """Pages that found no room: to the router they are misses."""
        self._extents: dict[PageName, Extent] = {}
        self._all: dict[Extent, None] = {}
        self._tail = Extent()
        """Takes new pages; the only one that is not in ``_all``."""
        self._slots = 0
        """Slots of all extents, holes included."""
        self._shared: dict[int, int] = {}
        """Masks in use, each once."""
        self._counts: dict[int, int] = {}
        """Pages at each open place."""
        self._open = 0
        """Places in use, as a mask."""
        self._closed = 0
        """Places that were closed and are still in some masks."""
        self._sweeping = 0
        self._unswept: list[Extent] = []

    def __repr__(self) -> str:
        return f"<PageMap {len(self._extents)}/{self.limit} pages, {len(self._counts)} places>"

    def __len__(self) -> int:
        return len(self._extents)

    # ------------------------------------------------------------ places

    def open(self) -> int:
        """A new, empty place: a mask with one bit."""
        used = self._open | self._closed
        place = ~used & (used + 1)
        self._open |= place
        self._counts[place] = 0
        return place

    def close(self, place: int) -> None:
        """Nothing is at ``place`` from now on. Its memory comes back by ``sweep``."""
        self._open &= ~place
        if self._counts.pop(place):
            self._closed |= place

    def count(self, place: int) -> int:
        """Pages at an open place."""
        return self._counts[place]

    # ------------------------------------------------------------ pages

    def store(self, place: int, names: Sequence[PageName]) -> None:
        """``names`` are at ``place``."""
        if self._extents.keys().isdisjoint(names):
            self._add(place, names)
            return
        for span in self._spans(names):
            if span.extent is None:
                self._add(place, names[span.begin : span.end])
            else:
                self._counts[place] += self._mark(span.extent, span, place, 0)

    def remove(self, place: int, names: Sequence[PageName]) -> None:
        """``names`` are no longer at ``place``."""
        for span in self._spans(names):
            if span.extent is not None:
                self._counts[place] -= self._mark(span.extent, span, 0, place)

    def find(self, names: Sequence[PageName]) -> list[Run]:
        """Where the pages of ``names`` are, up to the first that is nowhere."""
        runs: list[Run] = []
        for begin, end, extent, offset in self._spans(names):
            if extent is None:
                return runs
            masks = extent.masks[offset : offset + end - begin]
            at = 0
            while at < len(masks):
                here = masks[at] & self._open
                if not here:
                    return runs
                at = _end_of_run(masks, at)
                if runs and runs[-1].mask == here:
                    runs.pop()
                runs.append(Run(begin + at, here))
        return runs

    def _spans(self, names: Sequence[PageName]) -> Iterator[Span]:
        names = names if isinstance(names, list) else list(names)  # a tuple equals no part of an extent
        get, at, total = self._extents.get, 0, len(names)
        while at < total:
            begin, extent = at, get(names[at])
            if extent is None:
                at += 1
                while at < total and names[at] not in self._extents:
                    at += 1
                yield Span(begin, at, None, 0)
            else:
                offset = extent.names.index(names[at])
                at += extent.follows(offset, names, at)
                yield Span(begin, at, extent, offset)

    def _add(self, place: int, names: Sequence[PageName]) -> None:
        """Pages that are nowhere yet."""
        if len(names) > 1:
            names = list(dict.fromkeys(names))  # one that comes twice would stand in two slots
        room = self.limit - len(self._extents)
        if len(names) > room:
            self.turned_away += len(names) - room
            names = names[:room]
        self._counts[place] += len(names)
        self._append(names, self._share(place))

    def _append(self, names: Sequence[PageName], mask: int) -> None:
        """Let pages that are in no extent stand in the last ones."""
        self._slots += len(names)
        while names:
            tail = self._tail
            part, names = names[: tail.room], names[tail.room :]
            tail.append(part, mask)
            for name in part:
                self._extents[name] = tail
            if not tail.room:
                self._close_tail()

    def _close_tail(self) -> None:
        full, self._tail = self._tail, Extent()
        self._all[full] = None
        if not full.live:
            self._discard(full)

    def _mark(self, extent: Extent, span: Span, add: int, take: int) -> int:
        """Add places to the masks of a span and take some away; how many pages that changed."""
        masks = extent.masks
        last, new, changed = -1, 0, 0
        for offset in range(span.offset, span.offset + span.end - span.begin):
            mask = masks[offset]
            if mask is not last:  # most pages of an event have one mask before it
                last, new = mask, self._share((mask | add) & ~take)
            if mask != new:
                changed += 1
                masks[offset] = new
                if not new:
                    self._drop(extent, offset)
        return changed

    def _drop(self, extent: Extent, offset: int) -> None:
        name = extent.names[offset]
        if name is not None:
            del self._extents[name]
        extent.drop(offset)
        if not extent.live and extent in self._all:
            self._discard(extent)

    def _discard(self, extent: Extent) -> None:
        del self._all[extent]
        self._slots -= len(extent.names)

    def _share(self, mask: int) -> int:
        if len(self._shared) >= MAX_SHARED_MASKS:
            self._shared.clear()  # costs memory only: masks in use stay, and equal ones are shared from here on
        return self._shared.setdefault(mask, mask)

    # ------------------------------------------------------------ memory

    def sweep(self, extents: int) -> None:
        """Give memory back: take closed places out of up to ``extents`` extents, and merge those that are mostly holes.

        Called regularly; what it has not come to yet is not shown, it only takes room.
        """
        if not self._unswept:
            if not self._closed and not self._is_wasteful:
                return
            self._sweeping, self._unswept = self._closed, [*self._all, self._tail]
        batch, self._unswept = self._unswept[-extents:], self._unswept[:-extents]
        for extent in batch:
            self._clear(extent, self._sweeping)
            if self._is_wasteful and extent in self._all and 2 * extent.live < len(extent.names):
                self._move(extent)
        if not self._unswept:
            self._closed &= ~self._sweeping

    @property
    def _is_wasteful(self) -> bool:
        return self._slots > 2 * len(self._extents) + SLACK_SLOTS

    def _clear(self, extent: Extent, places: int) -> None:
        if any(mask & places for mask in set(extent.masks)):
            self._mark(extent, Span(0, len(extent.names), extent, 0), 0, places)

    def _move(self, extent: Extent) -> None:
        """Let the pages of an extent stand in others, without its holes."""
        self._discard(extent)
        for name, mask in zip(extent.names, extent.masks, strict=True):
            if name is not None:
                self._append([name], mask)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every page stands in one slot, and slots and places are counted right."""
        extents = [*self._all, self._tail]
        slots = [(name, extent) for extent in extents for name in extent.names if name is not None]
        assert dict(slots) == self._extents, "a page is not where it is looked for"
        assert len(slots) == len(self._extents), "a page stands in two slots"
        assert self._slots == sum(len(extent.names) for extent in extents), "slots are miscounted"
        masks = [mask for extent in extents for mask in extent.masks if mask]
        assert len(masks) == len(slots), "a page is nowhere"
        for extent in extents:
            assert extent.live == sum(name is not None for name in extent.names), f"{extent} is miscounted"
        for place, pages in self._counts.items():
            assert pages == sum(bool(mask & place) for mask in masks), f"place {place:b} is miscounted"


def _end_of_run(masks: list[int], begin: int) -> int:
    """Index of the first mask after ``begin`` that is another; counting and comparing slices are loops of C."""
    mask = masks[begin]
    length = masks.count(mask)
    if length == len(masks):
        return length
    if masks[begin : begin + length] == [mask] * length:
        return begin + length
    return next((at for at in range(begin + 1, len(masks)) if masks[at] != mask), len(masks))
