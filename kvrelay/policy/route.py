"""Choose where one prompt is computed and where its answer is written, by predicted seconds. All ways compete in one
sum, and the runners-up are kept. It must never reserve anything."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cached_property

from kvrelay.policy.cost import (
    EFFORT_SHARE,
    OWN,
    Item,
    Prompt,
    Readers,
    Reading,
    Source,
    Ways,
    Writers,
    between_chunks_s,
    harmed,
    least_read_s,
    prefill_price,
    read,
    transfer_s,
    write,
)
from kvrelay.types import Value

EQUAL_SHARE = 0.01
"""Costs that differ by less than this share are equal: no prediction is that good, and equals take turns, which
spreads what they cache."""
RUNNERS_UP = 3


class Path(StrEnum):
    """How a prompt gets computed."""

    REMOTE_PREFILL = "remote_prefill"
    LOCAL = "local"


class Option(Value, frozen=True, kw_only=True):
    """One way to serve a request, and what it was predicted to cost."""

    path: Path
    prefill: str | None
    """None: the writer computes the prompt itself."""
    decode: str
    source: Source
    """Where the cached prefix comes from."""
    cached_tokens: int
    moved_tokens: int
    """Tokens whose KV has to travel to D's node."""
    items: tuple[tuple[str, float], ...]
    """``cost.Item`` and seconds."""
    tpot_s: float
    """Predicted time per output token after the first."""

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.items)

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token; without harm to others and prices."""
        return sum(seconds for name, seconds in self.items if name in OWN)

    def explain(self) -> dict[str, object]:
        """JSON-ready; absent things are left out."""
        known: dict[str, object] = {
            "path": self.path,
            "prefill_worker": self.prefill,
            "decode_worker": self.decode,
            "source": self.source.kind,
            "origin": self.source.origin or None,
            "cached_tokens": self.cached_tokens,
            "moved_tokens": self.moved_tokens,
            "cost_s": {name: round(seconds, 6) for name, seconds in self.items},
            "total_s": round(self.total_s, 6),
            "ttft_s": round(self.ttft_s, 6),
            "tpot_s": round(self.tpot_s, 6),
        }
        return {key: value for key, value in known.items() if value is not None}


class Decision(Value, frozen=True, kw_only=True):
    """The cheapest option and the next ones, cheapest first."""

    chosen: Option
    runners_up: tuple[Option, ...]
    guesses: tuple[str, ...] = ()
    """Items of the chosen one, and ``tpot``, whose laws have seen nothing yet: their seconds come from data sheets."""

    def explain(self) -> dict[str, object]:
        """JSON-ready; ``guesses`` are left out when there are none."""
        said = {**self.chosen.explain(), "runners_up": [option.explain() for option in self.runners_up]}
        return said | ({"guesses": list(self.guesses)} if self.guesses else {})


def choose(prompt: Prompt, readers: Readers, writers: Writers, ways: Ways) -> Decision | None:
    """The cheapest (reader, writer, path); None when no way is allowed."""
    prices = _Prices(prompt, readers, writers, ways)
    chosen = prices.cheapest()
    if chosen is None:
        return None
    others = [place for place in prices.ranked() if place != chosen]
    return Decision(chosen=prices.option(*chosen), runners_up=tuple(prices.option(*place) for place in others))


Place = tuple[int, int]
"""Positions of reader and writer; ``LOCAL`` for a writer that computes the prompt itself."""
LOCAL = -1
_Priced = tuple[float, int, int]
"""Total and place."""


class _Prices:
    """Costs of one request. Of most workers and pairs it is enough to know that they cost more than the cheapest."""

    def __init__(self, prompt: Prompt, readers: Readers, writers: Writers, ways: Ways) -> None:
        self._prompt, self._readers, self._writers, self._ways = prompt, readers, writers, ways
        self._reads: dict[int, tuple[float, Reading]] = {}
        self._writing = {at: write(prompt, writers, at) for at in {*ways.writers, *writers.computes}}
        self._write_s = {
            at: writing.wait_s + writers.answer_s[at] + writing.harm_s + writing.pressure_s
            for at, writing in self._writing.items()
        }
        self._least_read_s = {
            at: readers.queue_s[at] + least_read_s(prompt, readers, at, prefill_price(readers, at)) + ways.least_s[at]
            for at in ways.readers
        }
        """By reader, with the least that its way to a writer takes."""

    def _read(self, at: int) -> tuple[float, Reading]:
        """What a reader costs, and why."""
        known = self._reads.get(at)
        if known is None:
            price = prefill_price(self._readers, at)
            reading = read(self._prompt, self._readers, at, price)
            read_s = self._readers.queue_s[at] + reading.source_s + price * reading.prefill_s
            known = self._reads[at] = read_s, reading
        return known

    def _remote_s(self, reader: int, writer: int) -> float:
        read_s, reading = self._read(reader)
        moved_s = self._moved_s(reader, writer, reading)
        return read_s + moved_s + self._write_s[writer] + self._behind_s(reader, writer, reading, moved_s)

    def _behind_s(self, reader: int, writer: int, reading: Reading, moved_s: float) -> float:
        """How long the prompts that the writer computes itself keep one waiting that comes when the reader is done."""
        queue_s = self._writers.readers.queue_s[writer]
        if not queue_s:
            return 0.0
        return max(0.0, queue_s - self._readers.queue_s[reader] - reading.source_s - reading.prefill_s - moved_s)

    def _moved_s(self, reader: int, writer: int, reading: Reading) -> float:
        return transfer_s(self._prompt, self._readers, reading.prefill_s, self._ways, reader, writer)

    def _own_reading(self, at: int) -> Reading:
        """Of a writer that computes the prompt itself."""
        return read(self._prompt, self._writers.readers, at, 1.0 + harmed(self._writers, at))

    def _own_wait_s(self, at: int, own: Reading) -> float:
        return self._writers.readers.queue_s[at] + between_chunks_s(self._prompt, self._writers, at, own)

    # ------------------------------------------------------------ the cheapest

    @cached_property
    def _local(self) -> list[_Priced]:
        """Writers that compute the prompt themselves: the cheapest, and all equals."""
        found: list[_Priced] = []
        limit_s, writers = float("inf"), self._writers
        rest_s = {at: writers.readers.queue_s[at] + self._write_s[at] for at in writers.computes}
        for least_s, at in sorted(
            (rest + least_read_s(self._prompt, writers.readers, at, 1.0 + harmed(writers, at)), at)
            for at, rest in rest_s.items()
        ):
            if least_s > limit_s:
                break
            own = self._own_reading(at)
            total_s = own.source_s + (1.0 + harmed(writers, at)) * own.prefill_s + rest_s[at]
            total_s += between_chunks_s(self._prompt, writers, at, own)
            insort(found, (total_s, LOCAL, at))
            if len(found) > RUNNERS_UP:
                limit_s = max(found[RUNNERS_UP][0], (1.0 + EQUAL_SHARE) * found[0][0])
        return found

    @cached_property
    def _remote(self) -> list[_Priced]:
        """The cheapest pairs. What reader and writer cost without the way between them tells most others off."""
        found: list[_Priced] = []
        worst_s, ways = float("inf"), self._ways
        writers = sorted((self._write_s[at], at) for at in ways.writers)
        for least_s, reader in sorted((least_s, at) for at, least_s in self._least_read_s.items()):
            if not writers or least_s + writers[0][0] >= worst_s:
                break
            at_least_s, allowed = self._read(reader)[0] + ways.least_s[reader], ways.allowed[reader]
            for write_s, writer in writers:
                if at_least_s + write_s >= worst_s:
                    break
                if allowed[writer]:
                    insort(found, (self._remote_s(reader, writer), reader, writer))
                    if len(found) > RUNNERS_UP:
                        del found[RUNNERS_UP + 1 :]
                        worst_s = found[-1][0]
        return found

    def cheapest(self) -> Place | None:
        """Equals take turns: first among readers for the best writer, then among writers for that reader."""
        if self._local and (not self._remote or self._local[0][0] < self._remote[0][0]):
            limit_s = (1.0 + EQUAL_SHARE) * self._local[0][0]
            return LOCAL, _in_turn([at for total_s, _, at in self._local if total_s <= limit_s], self._writers.readers)
        if not self._remote:
            return None
        _, reader, writer = self._remote[0]
        reader = self._turn_of_readers(reader, writer)
        return reader, self._turn_of_writers(reader)

    def _turn_of_readers(self, best: int, writer: int) -> int:
        limit_s = self._remote_s(best, writer) + EQUAL_SHARE * self._read(best)[0]
        rest_s = self._write_s[writer]
        return _in_turn(
            [
                at
                for at, least_s in self._least_read_s.items()
                if least_s + rest_s <= limit_s
                and self._ways.allowed[at][writer]
                and self._remote_s(at, writer) <= limit_s
            ],
            self._readers,
        )

    def _turn_of_writers(self, reader: int) -> int:
        """The best one for another reader of the same cost may not be the best for ``reader``."""
        read_s = self._read(reader)[0]
        limit_s, totals = float("inf"), {}
        for write_s, at in sorted((self._write_s[at], at) for at in self._ways.writers):
            if read_s + self._ways.least_s[reader] + write_s > limit_s:
                break
            if self._ways.allowed[reader][at]:
                total_s = totals[at] = self._remote_s(reader, at)
                limit_s = min(limit_s, total_s + EQUAL_SHARE * (total_s - read_s))
        return _in_turn([at for at, total_s in totals.items() if total_s <= limit_s], self._writers.readers)

    def ranked(self) -> Iterator[Place]:
        """The cheapest places of all, and the cheapest of each path, by cost."""
        few = sorted([*self._local, *self._remote])[: RUNNERS_UP + 1]
        for _, reader, writer in sorted({*few, *self._local[:1], *self._remote[:1]}):
            yield reader, writer

    # ------------------------------------------------------------ reasons

    def option(self, reader: int, writer: int) -> Option:
        """The place with its reasons."""
        local = reader == LOCAL
        reading, writing = self._own_reading(writer) if local else self._read(reader)[1], self._writing[writer]
        stored = 0.0 if local else self._ways.stored_tokens[reader][writer]
        moved_s = 0.0 if local else self._moved_s(reader, writer, reading)
        behind_s = self._own_wait_s(writer, reading) if local else self._behind_s(reader, writer, reading, moved_s)
        own = (
            ((Item.SOURCE, reading.source_s), (Item.PREFILL, reading.prefill_s))
            if local
            else (
                (Item.QUEUE, self._readers.queue_s[reader]),
                (Item.SOURCE, reading.source_s),
                (Item.PREFILL, reading.prefill_s),
                (Item.TRANSFER, moved_s),
            )
        )
        effort = () if local else ((Item.EFFORT, EFFORT_SHARE * reading.prefill_s),)
        others = harmed(self._writers, writer) if local else self._readers.passed[reader]
        return Option(
            path=Path.LOCAL if local else Path.REMOTE_PREFILL,
            prefill=None if local else self._readers.names[reader],
            decode=self._writers.readers.names[writer],
            source=reading.source,
            cached_tokens=int(reading.cached_tokens),
            moved_tokens=0 if local else int(max(0.0, self._prompt.tokens - stored)),
            items=(
                *own,
                (Item.DECODE_WAIT, writing.wait_s + behind_s),
                (Item.ANSWER, self._writers.answer_s[writer]),
                (Item.HARM, writing.harm_s + others * reading.prefill_s),
                *effort,
                (Item.PRESSURE, writing.pressure_s),
            ),
            tpot_s=writing.step_s,
        )


def _in_turn(equals: Iterable[int], workers: Readers) -> int:
    """Who of ``equals`` was chosen longest ago."""
    return min(equals, key=lambda position: (workers.last_chosen[position], workers.names[position]))
