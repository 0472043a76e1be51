"""How much of one prompt is where: the answer of the index to one question. It is good until the index changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from kvrelay.fleet.page_map import Run
from kvrelay.types import Medium

Places = Mapping[str, Mapping[Medium, int]]
"""Bit of every holder's every medium."""


class Coverage:
    """Leading pages of a prompt by holder. Only an unbroken run from the first page on counts."""

    __slots__ = ("_places", "_runs", "_wholes")

    def __init__(self, runs: Sequence[Run], places: Places, wholes: Mapping[str, int]) -> None:
        """``wholes``: bits of all places of each holder."""
        self._runs = runs
        self._places = places
        self._wholes = wholes

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
        here = [(holder, whole) for holder, whole in self._wholes.items() if whole & first]
        found = dict.fromkeys([holder for holder, _ in here], self.pages)
        together, pages = _together(here), 0
        for end, mask in self._runs:
            if mask & together != together:  # else none of them ends here
                found.update([(holder, pages) for holder, whole in here if not whole & mask])
                here = [each for each in here if each[1] & mask]
                together = _together(here)
            pages = end
        return found

    def _until_missing(self, wanted: int) -> int:
        pages = 0
        for end, mask in self._runs:
            if not mask & wanted:
                break
            pages = end
        return pages


def _together(holders: Sequence[tuple[str, int]]) -> int:
    return reduce(or_, [whole for _, whole in holders], 0)
