"""Choose where one prompt is computed and where its answer is written, by predicted seconds. All ways compete in one
sum, and the runners-up are kept. It must never reserve anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

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
    Writing,
    harmed,
    prefill_harm_s,
    read,
    transfer_s,
    write,
)
from kvrelay.policy.fit import Floats
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
    prices = _price(prompt, readers, writers, ways)
    if not prices.any:
        return None
    chosen = prices.cheapest()
    others = [place for place in prices.ranked(RUNNERS_UP + 1) if place != chosen]
    return Decision(chosen=prices.option(*chosen), runners_up=tuple(prices.option(*place) for place in others))


Place = tuple[int, int]
"""Positions of reader and writer; ``LOCAL`` for a writer that computes the prompt itself."""
LOCAL = -1


@dataclass(frozen=True)
class _Prices:
    """All costs of one request."""

    prompt: Prompt
    readers: Readers
    writers: Writers
    ways: Ways
    reading: Reading
    own_reading: Reading
    """Of the writers, computing the prompt themselves."""
    writing: Writing
    transfer_s: Floats
    own_harm_s: Floats
    remote: Floats
    """Totals ``[reader][writer]``; infinite where there is no way."""
    local: Floats
    """Totals ``[writer]``."""

    @property
    def any(self) -> bool:
        return bool(np.isfinite(self.remote).any() or np.isfinite(self.local).any())

    def cheapest(self) -> Place:
        """Equals take turns: first among readers for the best writer, then among writers for that reader."""
        remote_s, local_s = self.remote.min(initial=np.inf), self.local.min(initial=np.inf)
        if local_s < remote_s:
            return LOCAL, _in_turn(self.local, self.local, self.writers.readers)
        reader, writer = (int(position) for position in np.unravel_index(np.argmin(self.remote), self.remote.shape))
        reading = self.readers.queue_s + self.reading.source_s + (1.0 + EFFORT_SHARE) * self.reading.prefill_s
        reader = _in_turn(self.remote[:, writer], reading, self.readers)
        writing = self.remote[reader] - reading[reader]
        return reader, _in_turn(self.remote[reader], writing, self.writers.readers)

    def ranked(self, count: int) -> Iterator[Place]:
        """Places by cost, the cheapest ``count`` of them, and the cheapest of each path."""
        totals = np.concatenate([self.remote.ravel(), self.local])
        few = {*np.argpartition(totals, min(count, len(totals) - 1))[:count].tolist()}
        few.add(self.remote.size + int(np.argmin(self.local)))
        if self.remote.size:
            few.add(int(np.argmin(self.remote)))
        for position in sorted(few, key=lambda position: (totals[position], position)):
            if np.isfinite(totals[position]):
                yield self._place(position)

    def _place(self, position: int) -> Place:
        if position >= self.remote.size:
            return LOCAL, position - self.remote.size
        reader, writer = divmod(position, self.remote.shape[1])
        return reader, writer

    def option(self, reader: int, writer: int) -> Option:
        """The place with its reasons."""
        local = reader == LOCAL
        readers, at = (self.writers.readers, writer) if local else (self.readers, reader)
        reading = self.own_reading if local else self.reading
        return Option(
            path=Path.LOCAL if local else Path.REMOTE_PREFILL,
            prefill=None if local else readers.names[at],
            decode=self.writers.readers.names[writer],
            source=readers.sources.known[int(reading.source[at])],
            cached_tokens=int(reading.cached_tokens[at]),
            moved_tokens=0 if local else int(max(0.0, self.prompt.tokens - self.ways.stored_tokens[reader, writer])),
            items=tuple((name, float(seconds)) for name, seconds in self._items(reader, writer)),
            tpot_s=float(self.writing.step_s[writer]),
        )

    def _items(self, reader: int, writer: int) -> Iterator[tuple[Item, float]]:
        local = reader == LOCAL
        reading, at = (self.own_reading, writer) if local else (self.reading, reader)
        if not local:
            yield Item.QUEUE, self.readers.queue_s[at]
        yield Item.SOURCE, reading.source_s[at]
        yield Item.PREFILL, reading.prefill_s[at]
        if not local:
            yield Item.TRANSFER, self.transfer_s[reader, writer]
        yield Item.DECODE_WAIT, self.writing.wait_s[writer]
        yield Item.ANSWER, self.writers.answer_s[writer]
        yield Item.HARM, self.writing.harm_s[writer] + (self.own_harm_s[writer] if local else 0.0)
        if not local:
            yield Item.EFFORT, EFFORT_SHARE * reading.prefill_s[at]
        yield Item.PRESSURE, self.writing.pressure_s[writer]


def _price(prompt: Prompt, readers: Readers, writers: Writers, ways: Ways) -> _Prices:
    reading, writing = read(prompt, readers, 1.0 + EFFORT_SHARE), write(prompt, writers)
    own_reading = read(prompt, writers.readers, 1.0 + harmed(writers))
    moved_s, own_harm_s = transfer_s(prompt, readers, reading, ways), prefill_harm_s(own_reading, writers)
    answer_s = writing.wait_s + writers.answer_s + writing.harm_s + writing.pressure_s
    read_s = readers.queue_s + reading.source_s + (1.0 + EFFORT_SHARE) * reading.prefill_s
    local = own_reading.source_s + own_reading.prefill_s + own_harm_s + answer_s
    return _Prices(
        prompt=prompt,
        readers=readers,
        writers=writers,
        ways=ways,
        reading=reading,
        own_reading=own_reading,
        writing=writing,
        transfer_s=moved_s,
        own_harm_s=own_harm_s,
        remote=np.where(ways.allowed, read_s[:, np.newaxis] + moved_s + answer_s, np.inf),
        local=np.where(writers.computes, local, np.inf),
    )


def _in_turn(totals: Floats, parts: Floats, workers: Readers) -> int:
    """Of those whose total is the least but for ``EQUAL_SHARE`` of their own part: who was chosen longest ago."""
    best = int(np.argmin(totals))
    equal = np.flatnonzero(totals <= totals[best] + EQUAL_SHARE * abs(parts[best]))
    return int(min(equal, key=lambda position: (workers.last_chosen[position], workers.names[position])))
