"""How fast each store reaches each other one, and what is on the way between them, as tables for choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from kvrelay.policy.moves import Move, link, restore

_FIRST_ROWS = 8


Table = list[list[float]]


class Tables(NamedTuple):
    """``[from][to]`` each, by rows of stores."""

    latency_s: Table
    s_per_byte: Table
    in_flight_bytes: Table


class Quickest(NamedTuple):
    """No way from one store to another was ever believed to be faster."""

    latency_s: float
    s_per_byte: float


class Links:
    """Moves by pair of stores. Between a store and itself lies shared memory."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._moves: dict[tuple[str, str], Move] = {}
        self._tables = _empty(_FIRST_ROWS)
        self._least_s: dict[int, float] = {}
        """Least latency to another store until something is learned, by row."""
        self.quickest = Quickest(link().latency_s, link().s_per_byte)

    def __repr__(self) -> str:
        return f"<Links {len(self._rows)} stores, {len(self._moves)} known ways>"

    def rows(self, stores: Iterable[str]) -> tuple[int, ...]:
        """Row of each store."""
        return tuple([self._row(store) for store in stores])

    @property
    def tables(self) -> Tables:
        """As they are now; not to be written to."""
        return self._tables

    def least_s(self, row: int) -> float:
        """The least latency from a store to another one."""
        if row not in self._least_s:
            latency_s = self._tables.latency_s[row]
            self._least_s[row] = min([*latency_s[:row], *latency_s[row + 1 :]])
        return self._least_s[row]

    def leasts_s(self, rows: Iterable[int]) -> list[float]:
        """``least_s`` of each."""
        known = self._least_s
        return [known[row] if row in known else self.least_s(row) for row in rows]

    def restore_s(self, row: int, size_bytes: float) -> float:
        """Seconds to bring so many bytes from a store's memory into an engine beside it."""
        return self._tables.latency_s[row][row] + self._tables.s_per_byte[row][row] * size_bytes

    def move(self, source: str, target: str) -> Move:
        known = self._moves.get((source, target))
        return known if known is not None else restore() if source == target else link()

    def seconds(self, source: str, target: str, size_bytes: float) -> float:
        """How long so many bytes would take now, behind those that are under way."""
        row, column = self._row(source), self._row(target)  # before the table is looked at: they may make it grow
        in_flight = self._tables.in_flight_bytes[row][column]
        return self.move(source, target).seconds(size_bytes, in_flight)

    def learn(self, source: str, target: str, move: Move) -> None:
        """Predict the way from ``source`` to ``target`` by ``move`` from now on."""
        self._moves[source, target] = move
        if source != target:
            latency_s, s_per_byte = self.quickest
            self.quickest = Quickest(min(latency_s, move.latency_s), min(s_per_byte, move.s_per_byte))
        row, column = self._row(source), self._row(target)
        self._tables.latency_s[row][column], self._tables.s_per_byte[row][column] = move.latency_s, move.s_per_byte
        self._least_s.pop(row, None)

    def promise(self, source: str, target: str, size_bytes: int) -> None:
        """Add ``size_bytes`` to the bytes in flight; negative when they have arrived, or will not travel any more."""
        row, column = self._row(source), self._row(target)
        self._tables.in_flight_bytes[row][column] += size_bytes

    def known(self) -> dict[str, Move]:
        """What was learned, by source and target as a list in JSON: names may hold anything."""
        return {msgspec.json.encode(way).decode(): move for way, move in self._moves.items()}

    def recall(self, known: dict[str, Move]) -> None:
        """What ``known`` said in a former life; ways that are none are left out."""
        for way, move in known.items():
            with suppress(msgspec.DecodeError):
                source, target = msgspec.json.decode(way, type=tuple[str, str])
                self.learn(source, target, move)

    def keep_only(self, stores: Sequence[str]) -> None:
        """Forget stores that nobody knows any more, unless something is still on its way there."""
        gone = self._rows.keys() - set(stores)
        moving = self._tables.in_flight_bytes
        for store in gone:
            row = self._rows[store]
            if not any(moving[row]) and not any(line[row] for line in moving):
                del self._rows[store]
                self._moves = {way: move for way, move in self._moves.items() if store not in way}
                self._clean(row)

    def _clean(self, row: int) -> None:
        """Nothing is known of the ways from and to a store."""
        for table, clean in zip(self._tables, _empty(len(self._tables.latency_s)), strict=True):
            table[row] = clean[row]
            for line, clean_line in zip(table, clean, strict=True):
                line[row] = clean_line[row]
        self._least_s.clear()

    def _row(self, store: str) -> int:
        if store not in self._rows:
            free = set(range(len(self._rows) + 1)) - set(self._rows.values())
            self._rows[store] = min(free)
            self._grow()
        return self._rows[store]

    def _grow(self) -> None:
        count = len(self._tables.latency_s)
        if max(self._rows.values()) < count:
            return
        larger = _empty(2 * count)
        for table, old in zip(larger, self._tables, strict=True):
            for line, known in zip(table, old, strict=False):
                line[:count] = known
        self._tables = larger
        self._least_s.clear()

    def check(self, expected: dict[tuple[str, str], int]) -> None:
        """Raise AssertionError unless exactly ``expected`` bytes are on the way."""
        names = {row: store for store, row in self._rows.items()}
        moving = self._tables.in_flight_bytes
        seen = {
            (names[row], names[column]): int(size)
            for row, line in enumerate(moving)
            for column, size in enumerate(line)
            if size
        }
        if seen != {way: size for way, size in expected.items() if size}:
            raise AssertionError(f"on the way: {seen}, but open legs add up to {expected}")


def _empty(count: int) -> Tables:
    def table(other: float, same: float) -> Table:
        return [[same if row == column else other for column in range(count)] for row in range(count)]

    believed, near = link(), restore()
    return Tables(
        table(believed.latency_s, near.latency_s), table(believed.s_per_byte, near.s_per_byte), table(0.0, 0.0)
    )
