"""One law of many workers, as plain numbers and as arrays. It must never show two different things."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from kvrelay.policy.fit import Floats
from kvrelay.policy.perf import Rates

MANY = 16
"""Workers from which on arrays take less time."""


class Laws(Sequence[Rates]):
    """Rates by worker: ``laws[at]``; ``columns``: those of all workers, one array for each amount.

    Each is made of the other when it is asked for first, and kept from then on: a worker that learns changes its own
    place alone, while to make arrays of numbers takes longer than a choice.
    """

    def __init__(self, rates: Sequence[Rates] | None, columns: tuple[Floats, ...] | None = None) -> None:
        """Without ``rates`` they are what ``columns`` say."""
        self._count = len(columns[0]) if rates is None and columns else len(rates or ())
        self._rates = None if rates is None else list(rates)
        self._columns = columns

    def __repr__(self) -> str:
        return f"<Laws of {self._count} workers>"

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int, /) -> Rates: ...

    @overload
    def __getitem__(self, at: slice, /) -> list[Rates]: ...

    def __getitem__(self, at: int | slice, /) -> Rates | list[Rates]:
        return self._listed()[at]

    def __iter__(self) -> Iterator[Rates]:
        return iter(self._listed())

    def _listed(self) -> list[Rates]:
        if self._rates is None:
            self._rates = list(zip(*(column.tolist() for column in self._columns or ()), strict=True))
        return self._rates

    @property
    def columns(self) -> tuple[Floats, ...]:
        """The rates as arrays, one for each amount; callers must not write to them."""
        if self._columns is None:
            self._columns = tuple(np.array(self._listed(), float).T.copy())
        return self._columns

    def write(self, at: int, rates: Rates) -> None:
        """The worker there is believed to do this from now on."""
        self._listed()[at] = rates
        for column, rate in zip(self._columns or (), rates, strict=False):
            column[at] = rate

    def starts(self) -> list[float]:
        """What each worker's law begins with."""
        return [rates[0] for rates in self._listed()]

    def beside(self, others: Laws) -> Laws:
        """What they add where ``others`` begin anyway: the start is a way to the worker, a step and the way back, and
        an answer, which ``others`` are of, has all of them."""
        if self._count >= MANY:
            start, *more = self.columns
            return Laws(None, (np.maximum(0.0, start - others.columns[0]), *more))
        return Laws(
            [
                (start - other if start > other else 0.0, token, pair)
                for (start, token, pair), (other, *_) in zip(self._listed(), others, strict=True)
            ]
        )
