"""Costs of all places of one request, and the cheapest of them: of most it is enough to know that they cost more. It
must never name another place than pricing all of them in detail would."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, takewhile

from kvrelay.policy.bounds import least_read_s
from kvrelay.policy.cost import (
    Prompt,
    Readers,
    Reading,
    Ways,
    Writers,
    between_chunks_s,
    harmed,
    prefill_price,
    read,
    transfers_s,
)
from kvrelay.policy.writing import Writings

EQUAL_SHARE = 0.01
"""Costs that differ by less than this share are equal: no prediction is that good, and equals take turns, which
spreads what they cache."""
RUNNERS_UP = 3

Place = tuple[int, int]
"""Positions of reader and writer; ``LOCAL`` for a writer that computes the prompt itself."""
LOCAL = -1
_Priced = tuple[float, int, int]
"""Total and place."""


class Prices:
    """Those of one request."""

    def __init__(self, prompt: Prompt, readers: Readers, writers: Writers, ways: Ways) -> None:
        self.prompt = prompt
        self.readers = readers
        self.writers = writers
        self.ways = ways
        self._reads: dict[int, tuple[float, Reading]] = {}
        self._owns: dict[int, Reading] = {}
        self._remotes: dict[Place, tuple[float, float]] = {}
        """Total, and the hand-off's part beyond the prefill, of each pair that was priced."""
        self.writings = Writings(prompt, writers)
        self._write_s = self.writings.seconds
        self._least_read_s = self._leasts_read_s()
        self._least_local_s = self._leasts_local_s() if writers.computes else []
        self._readers = sorted(ways.readers, key=self._least_read_s.__getitem__)
        self._writers = sorted(ways.writers, key=self._write_s.__getitem__)
        self._computing = sorted(writers.computes, key=self._least_local_s.__getitem__)
        """Each in order, those first that may be cheapest."""
        self._local = self._cheapest_locals()
        self._remote = self._cheapest_pairs()

    def __repr__(self) -> str:
        return f"<Prices of {len(self.ways.readers)} readers, {len(self.ways.writers)} writers>"

    # ------------------------------------------------------------ of one place

    def _read(self, at: int) -> tuple[float, Reading]:
        """What a reader costs, and why."""
        known = self._reads.get(at)
        if known is None:
            price = prefill_price(self.readers, at)
            reading = read(self.prompt, self.readers, at, price)
            read_s = self.readers.queue_s[at] + reading.source_s + price * reading.prefill_s
            known = self._reads[at] = read_s, reading
        return known

    def reading(self, at: int) -> Reading:
        """How a reader would compute the prompt."""
        return self._read(at)[1]

    def own_reading(self, at: int) -> Reading:
        """How a writer would compute the prompt itself."""
        known = self._owns.get(at)
        if known is None:
            price = 1.0 + harmed(self.writers, at)
            known = self._owns[at] = read(self.prompt, self.writers.readers, at, price)
        return known

    def own_wait_s(self, at: int, own: Reading) -> float:
        """How long a prompt waits that a writer computes itself."""
        return self.writers.readers.queue_s[at] + between_chunks_s(self.prompt, self.writers, at, own)

    def moved_s(self, reader: int, writer: int) -> float:
        """How long the hand-off takes beyond the prefill."""
        return self._priced(reader, writer)[1]

    def behind_s(self, reader: int, writer: int, reading: Reading, moved_s: float) -> float:
        """How long the prompts that the writer computes itself keep one waiting that comes when the reader is done."""
        queue_s = self.writers.readers.queue_s[writer]
        if not queue_s:
            return 0.0
        return max(0.0, queue_s - self.readers.queue_s[reader] - reading.source_s - reading.prefill_s - moved_s)

    def _remote_s(self, reader: int, writer: int) -> float:
        return self._priced(reader, writer)[0]

    def _priced(self, reader: int, writer: int) -> tuple[float, float]:
        known = self._remotes.get((reader, writer))
        return self._remotes_s(reader, [writer])[0] if known is None else known

    def _remotes_s(self, reader: int, writers: Sequence[int]) -> list[tuple[float, float]]:
        read_s, reading = self._read(reader)
        moves_s = transfers_s(self.prompt, self.readers, reading.prefill_s, self.ways, reader, writers)
        found = [
            (read_s + moved_s + self._write_s[at] + self.behind_s(reader, at, reading, moved_s), moved_s)
            for at, moved_s in zip(writers, moves_s, strict=True)
        ]
        self._remotes.update(zip(zip(repeat(reader), writers), found, strict=False))
        return found

    def _local_s(self, at: int) -> float:
        own = self.own_reading(at)
        total_s = own.source_s + (1.0 + harmed(self.writers, at)) * own.prefill_s + self._write_s[at]
        return total_s + self.own_wait_s(at, own)

    # ------------------------------------------------------------ what they cost at least

    def _leasts_read_s(self) -> list[float]:
        """By reader, with the least that its way to a writer takes."""
        readers, ways = self.readers, self.ways
        price = [prefill_price(readers, at) for at in range(len(readers.names))]
        parts = zip(readers.queue_s, least_read_s(self.prompt, readers, price), ways.least_s, strict=True)
        return [queue_s + least_s + way_s for queue_s, least_s, way_s in parts]

    def _leasts_local_s(self) -> list[float]:
        """By writer, for one that computes the prompt itself."""
        writers = self.writers
        price = [1.0 + harmed(writers, at) for at in range(len(writers.answer_s))]
        least_s = least_read_s(self.prompt, writers.readers, price)
        parts = zip(writers.readers.queue_s, self._write_s, least_s, strict=True)
        return [wait_s + writing_s + reading_s for wait_s, writing_s, reading_s in parts]

    # ------------------------------------------------------------ the cheapest

    def _cheapest_locals(self) -> list[_Priced]:
        """The cheapest writers that compute the prompt themselves."""
        found: list[_Priced] = []
        worst_s = float("inf")
        for at in self._computing:
            if self._least_local_s[at] >= worst_s:
                break
            worst_s = _keep(found, (self._local_s(at), LOCAL, at), [])
        return found

    def _cheapest_pairs(self) -> list[_Priced]:
        """The cheapest one, and those that are among the cheapest places of all.

        What reader and writer cost without the way between them tells most others off.
        """
        found: list[_Priced] = []
        worst_s, writers = float("inf"), self._writers
        for reader in self._readers if writers else ():
            if self._least_read_s[reader] + self._write_s[writers[0]] >= worst_s:
                break
            few = self._few(reader, worst_s)
            for (total_s, _), writer in zip(self._remotes_s(reader, few), few, strict=True):
                if total_s < worst_s:
                    worst_s = _keep(found, (total_s, reader, writer), self._local)
        return found

    def _few(self, reader: int, worst_s: float) -> list[int]:
        """Writers that might cost less than ``worst_s`` with this reader."""
        limit_s, allowed = worst_s - self._read(reader)[0] - self.ways.least_s[reader], self.ways.allowed[reader]
        first_over = bisect_left(self._writers, limit_s, key=self._write_s.__getitem__)
        return [at for at in self._writers[:first_over] if allowed[at]]

    def cheapest(self) -> Place | None:
        """Equals take turns: first among readers for the best writer, then among writers for that reader."""
        if self._local and (not self._remote or self._local[0][0] < self._remote[0][0]):
            return LOCAL, self._turn_of_locals()
        if not self._remote:
            return None
        _, reader, writer = self._remote[0]
        reader = self._turn_of_readers(reader, writer)
        return reader, self._turn_of_writers(reader)

    def _turn_of_locals(self) -> int:
        limit_s, least_s = (1.0 + EQUAL_SHARE) * self._local[0][0], self._least_local_s
        equals = takewhile(lambda at: least_s[at] <= limit_s, self._computing)
        return _first_in_turn(equals, self.writers.readers, limit_s, self._local_s)

    def _turn_of_readers(self, best: int, writer: int) -> int:
        limit_s = self._remote_s(best, writer) + EQUAL_SHARE * self._read(best)[0]
        rest_s, allowed = self._write_s[writer], self.ways.allowed
        equals = takewhile(lambda at: self._least_read_s[at] + rest_s <= limit_s, self._readers)
        understood = (at for at in equals if allowed[at][writer])
        return _first_in_turn(understood, self.readers, limit_s, lambda at: self._remote_s(at, writer))

    def _turn_of_writers(self, reader: int) -> int:
        """The best one for another reader of the same cost may not be the best for ``reader``."""
        read_s, allowed, best_s = self._read(reader)[0], self.ways.allowed[reader], float("inf")
        rest_s, writers = read_s + self.ways.least_s[reader], [at for at in self._writers if allowed[at]]
        for at in writers:
            if rest_s + self._write_s[at] >= best_s:
                break
            best_s = min(best_s, self._remote_s(reader, at))
        limit_s = best_s + EQUAL_SHARE * (best_s - read_s)
        equals = takewhile(lambda at: rest_s + self._write_s[at] <= limit_s, writers)
        return _first_in_turn(equals, self.writers.readers, limit_s, lambda at: self._remote_s(reader, at))

    def ranked(self) -> Iterator[Place]:
        """The cheapest places of all, and the cheapest of each path, by cost."""
        few = sorted([*self._local, *self._remote])[: RUNNERS_UP + 1]
        for _, reader, writer in sorted({*few, *self._local[:1], *self._remote[:1]}):
            yield reader, writer


def _keep(found: list[_Priced], place: _Priced, others: Sequence[_Priced]) -> float:
    """One more of the cheapest, of which few are kept.

    Who costs as much as the answer is not the cheapest of them, and not among the few cheapest of them and ``others``.
    """
    insort(found, place)
    del found[RUNNERS_UP + 1 :]
    if len(found) + len(others) <= RUNNERS_UP:
        return float("inf")
    all_s = sorted([total_s for total_s, _, _ in (*found, *others)])
    return max(found[0][0], all_s[RUNNERS_UP])


def _first_in_turn(equals: Iterable[int], workers: Readers, limit_s: float, cost_s: Callable[[int], float]) -> int:
    """Who was chosen longest ago of those that cost up to ``limit_s``, of ``equals`` that may.

    Ordered first, and priced in that order: of many equals one is priced.
    """
    in_turn = sorted((workers.last_chosen[at], workers.names[at], at) for at in equals)
    return next(at for *_, at in in_turn if cost_s(at) <= limit_s)
