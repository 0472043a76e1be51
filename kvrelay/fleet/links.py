"""How fast each store reaches each other one, and what is on the way between them, as matrices for whoever chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.policy.cost import Integers
from kvrelay.policy.fit import Floats
from kvrelay.policy.moves import Move, link, tier

_FIRST_ROWS = 8


class Matrices(NamedTuple):
    """``[from][to]`` each."""

    latency_s: Floats
    s_per_byte: Floats
    in_flight_bytes: Floats


class Links:
    """Moves by pair of stores. Between a store and itself lies shared memory."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._moves: dict[tuple[str, str], Move] = {}
        self._tables = _empty(_FIRST_ROWS)

    def __repr__(self) -> str:
        return f"<Links {len(self._rows)} stores, {len(self._moves)} known ways>"

    def rows(self, stores: Iterable[str]) -> Integers:
        """Row of each store, for ``between``."""
        return np.array([self._row(store) for store in stores], dtype=np.int64)

    def between(self, sources: Integers, targets: Integers) -> Matrices:
        """All ways from ``sources`` to ``targets``, given as rows."""
        return Matrices(*(table[sources[:, np.newaxis], targets] for table in self._tables))

    def restore_s(self, stores: Integers, size_bytes: Floats) -> Floats:
        """Seconds to bring so many bytes from each store's memory into an engine beside it."""
        latency_s, s_per_byte = self._tables.latency_s[stores, stores], self._tables.s_per_byte[stores, stores]
        return np.asarray(latency_s + s_per_byte * size_bytes)

    def move(self, source: str, target: str) -> Move:
        known = self._moves.get((source, target))
        return known if known is not None else tier("memory") if source == target else link()

    def seconds(self, source: str, target: str, size_bytes: float) -> float:
        """How long so many bytes would take now, behind those that are under way."""
        rows = self._row(source), self._row(target)  # before the table is looked at: they may make it grow
        in_flight = float(self._tables.in_flight_bytes[rows])
        return self.move(source, target).seconds(size_bytes, in_flight)

    def learn(self, source: str, target: str, move: Move) -> None:
        """From now on the way from ``source`` to ``target`` is believed to be ``move``."""
        self._moves[source, target] = move
        at = self._row(source), self._row(target)
        self._tables.latency_s[at], self._tables.s_per_byte[at] = move.latency_s, move.s_per_byte

    def promise(self, source: str, target: str, size_bytes: int) -> None:
        """So many more bytes are to travel; negative when they have, or will not any more."""
        self._tables.in_flight_bytes[self._row(source), self._row(target)] += size_bytes

    def known(self) -> dict[str, Move]:
        """What was learned, by ``source>target``."""
        return {f"{source}>{target}": move for (source, target), move in self._moves.items()}

    def recall(self, known: dict[str, Move]) -> None:
        """What ``known`` said in a former life."""
        for way, move in known.items():
            source, _, target = way.partition(">")
            self.learn(source, target, move)

    def keep_only(self, stores: Sequence[str]) -> None:
        """Forget stores that nobody knows any more, unless something is still on its way there."""
        gone = self._rows.keys() - set(stores)
        moving = self._tables.in_flight_bytes
        for store in [store for store in gone if not moving[self._rows[store]].any()]:
            row = self._rows[store]
            if moving[:, row].any():
                continue
            del self._rows[store]
            self._moves = {way: move for way, move in self._moves.items() if store not in way}
            fresh = _empty(len(moving))
            for table, clean in zip(self._tables, fresh, strict=True):
                table[row], table[:, row] = clean[row], clean[:, row]

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
            table[:count, :count] = old
        self._tables = larger

    def check(self, expected: dict[tuple[str, str], int]) -> None:
        """Raise AssertionError unless exactly ``expected`` bytes are on the way."""
        names = {row: store for store, row in self._rows.items()}
        moving = self._tables.in_flight_bytes
        seen = {(names[a], names[b]): int(moving[a, b]) for a, b in np.argwhere(moving != 0).tolist()}
        if seen != {way: size for way, size in expected.items() if size}:
            raise AssertionError(f"on the way: {seen}, but open legs add up to {expected}")


def _empty(count: int) -> Matrices:
    believed, same = link(), tier("memory")
    latency_s = np.full((count, count), believed.latency_s)
    s_per_byte = np.full((count, count), believed.s_per_byte)
    np.fill_diagonal(latency_s, same.latency_s)
    np.fill_diagonal(s_per_byte, same.s_per_byte)
    return Matrices(latency_s, s_per_byte, np.zeros((count, count)))
