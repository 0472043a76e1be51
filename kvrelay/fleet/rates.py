"""Laws of many workers as one matrix, kept until one of them learns. It must never show one that has learned since."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

import numpy as np

from kvrelay.policy.fit import Fit, Floats
from kvrelay.policy.perf import Perf


class Law(Enum):
    """One law of ``Perf``; the value is its rows in a sheet."""

    PREFILL = slice(0, 3)
    STEP = slice(3, 6)
    ANSWER = slice(6, 7)

    def of(self, perf: Perf) -> Fit:
        """This law of ``perf``."""
        return perf.prefill if self is Law.PREFILL else perf.step if self is Law.STEP else perf.answer


_ROWS = 7
MAX_SHEETS = 16

Group = tuple[Law, str]
"""Who believes one law: a kind's name, or a worker that believes its own: its name after a ``\\0``."""


class _Sheet:
    """``[row][worker]`` for one tuple of workers."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.columns = {name: column for column, name in enumerate(names)}
        self.table = np.zeros((_ROWS, len(names)))
        self.stale: set[Group] | None = None
        """None: all of it."""


class RateSheets:
    """Sheets of the last tuples that were asked for."""

    def __init__(self, group_of: Callable[[Law, str], Group], believed: Callable[[Group], Believed]) -> None:
        self._group_of = group_of
        self._believed = believed
        self._sheets: dict[tuple[str, ...], _Sheet] = {}

    def __repr__(self) -> str:
        return f"<RateSheets {len(self._sheets)}>"

    def of(self, names: tuple[str, ...]) -> Floats:
        """``[row][worker]``; not to be written to."""
        sheet = self._sheets.get(names)
        if sheet is None:
            if len(self._sheets) >= MAX_SHEETS:
                self._sheets.clear()
            sheet = self._sheets[names] = _Sheet(names)
        if sheet.stale is None:
            sheet.stale = {self._group_of(law, name) for name in names for law in Law}
        if sheet.stale:
            self._refresh(sheet, sheet.stale)
        return sheet.table

    def _refresh(self, sheet: _Sheet, groups: Collection[Group]) -> None:
        # A new table: whoever got the last one keeps what he got.
        sheet.table = sheet.table.copy()
        for group in groups:
            fit, workers = self._believed(group)
            columns = [sheet.columns[name] for name in workers if name in sheet.columns]
            if columns:
                sheet.table[group[0].value, columns] = np.array(fit.rates)[:, np.newaxis]
        sheet.stale = set()

    def outdated(self, *groups: Group) -> None:
        """Their laws have learned."""
        for sheet in self._sheets.values():
            if sheet.stale is not None:
                sheet.stale.update(groups)

    def regrouped(self) -> None:
        """Workers came, went or became another kind."""
        for sheet in self._sheets.values():
            sheet.stale = None


Believed = tuple[Fit, Collection[str]]
"""A law, and who believes it."""
