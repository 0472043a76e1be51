"""How much of one prompt is where: the answer of the index to one question. It is good until the index changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.fleet.page_map import Run
from kvrelay.types import Medium

Places = Mapping[str, Mapping[Medium, int]]
"""Bit of every holder's every medium."""


class Coverage:
    """Leading pages of a prompt by holder. Only an unbroken run from the first page on counts."""

    __slots__ = ("_places", "_runs")

    def __init__(self, runs: Sequence[Run], places: Places) -> None:
        self._runs = runs
        self._places = places

    def __repr__(self) -> str:
        held = ", ".join(f"{holder!r} {pages}" for holder, pages in sorted(self.leading().items()))
        return f"<Coverage {held or 'nowhere'}>"

    @property
    def pages(self) -> int:
        """Leading pages that are anywhere, all holders together."""
        return self._runs[-1].end if self._runs else 0

    def at(self, *holders: str, media: Sequence[Medium] = tuple(Medium)) -> int:
        """Leading pages that ``holders`` have together, in any of ``media``."""
        wanted = 0
        for holder in holders:
            for medium, place in self._places.get(holder, {}).items():
                if medium in media:
                    wanted |= place
        return self._until_missing(wanted)

    def leading(self) -> dict[str, int]:
        """Leading pages of every holder that has the first one."""
        if not self._runs:
            return {}
        first = self._runs[0].mask
        found: dict[str, int] = {}
        for holder, places in self._places.items():
            wanted = 0
            for place in places.values():
                wanted |= place
            if first & wanted:
                found[holder] = self._until_missing(wanted)
        return found

    def _until_missing(self, wanted: int) -> int:
        pages = 0
        for end, mask in self._runs:
            if not mask & wanted:
                break
            pages = end
        return pages
