"""Token ids of a prompt and its answer as one sequence. It must never copy more of them than is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class Joined(Sequence[int]):
    """What ``first`` and ``second`` hold at present, one after the other."""

    def __init__(self, first: Sequence[int], second: Sequence[int]) -> None:
        self._first = first
        self._second = second

    def __repr__(self) -> str:
        return f"<Joined {len(self._first)} and {len(self._second)} tokens>"

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        places, border = range(len(self))[at], len(self._first)
        if isinstance(places, int):
            return self._first[places] if places < border else self._second[places - border]
        if places.step != 1:
            return [self[place] for place in places]
        begin, end = (max(0, place - border) for place in (places.start, places.stop))
        return [*self._first[places.start : places.stop], *self._second[begin:end]]
