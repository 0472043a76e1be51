"""Laws of many workers as one matrix, kept until one of them learns. It must never show one that has learned since."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvrelay.policy.fit import Floats
from kvrelay.policy.perf import Perf

PREFILL, STEP, ANSWER = slice(0, 3), slice(3, 6), 6
"""Rows of a sheet: rates of ``perf.prefill_amounts``, of a decode step, and the seconds of an answer."""
_ROWS = 7
MAX_SHEETS = 16


class _Sheet:
    """``[row][worker]`` for one tuple of workers."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.columns = {name: column for column, name in enumerate(names)}
        self.table = np.zeros((_ROWS, len(names)))
        self.stale = set(names)


class RateSheets:
    """Sheets of the last tuples that were asked for."""

    def __init__(self, perf: Callable[[str], Perf]) -> None:
        self._perf = perf
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
        if sheet.stale:
            self._refresh(sheet)
        return sheet.table

    def _refresh(self, sheet: _Sheet) -> None:
        # A new table: whoever got the last one keeps what he got.
        sheet.table = sheet.table.copy()
        for name in sheet.stale & sheet.columns.keys():
            perf = self._perf(name)
            rates = (*perf.prefill.rates, *perf.step.rates, perf.answer.rates[0])
            sheet.table[:, sheet.columns[name]] = rates
        sheet.stale = set()

    def outdated(self, workers: Iterable[str]) -> None:
        """These have learned."""
        for sheet in self._sheets.values():
            sheet.stale.update(workers)
