"""Choose where one prompt is computed and where its answer is written, by predicted seconds. All ways compete in one
sum, and the runners-up are kept. It must never reserve anything."""

from __future__ import annotations

from enum import StrEnum

from kvrelay.policy.cost import EFFORT_SHARE, OWN, Item, Prompt, Readers, Source, Ways, Writers, harmed
from kvrelay.policy.prices import LOCAL, Prices
from kvrelay.types import Value


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
    prices = Prices(prompt, readers, writers, ways)
    chosen = prices.cheapest()
    if chosen is None:
        return None
    others = [place for place in prices.ranked() if place != chosen]
    return Decision(chosen=_option(prices, *chosen), runners_up=tuple(_option(prices, *place) for place in others))


def _option(prices: Prices, reader: int, writer: int) -> Option:
    """The place with its reasons."""
    return _local(prices, writer) if reader == LOCAL else _remote(prices, reader, writer)


def _local(prices: Prices, at: int) -> Option:
    writers, own, writing = prices.writers, prices.own_reading(at), prices.writings[at]
    return Option(
        path=Path.LOCAL,
        prefill=None,
        decode=writers.readers.names[at],
        source=own.source,
        cached_tokens=int(own.cached_tokens),
        moved_tokens=0,
        items=(
            (Item.SOURCE, own.source_s),
            (Item.PREFILL, own.prefill_s),
            (Item.DECODE_WAIT, writing.wait_s + prices.own_wait_s(at, own)),
            (Item.ANSWER, writers.answer_s[at]),
            (Item.HARM, writing.harm_s + harmed(writers, at) * own.prefill_s),
            (Item.PRESSURE, writing.pressure_s),
        ),
        tpot_s=writing.step_s,
    )


def _remote(prices: Prices, reader: int, writer: int) -> Option:
    readers, writers, writing = prices.readers, prices.writers, prices.writings[writer]
    reading, moved_s = prices.reading(reader), prices.moved_s(reader, writer)
    stored = prices.ways.stored_tokens[reader][writer]
    return Option(
        path=Path.REMOTE_PREFILL,
        prefill=readers.names[reader],
        decode=writers.readers.names[writer],
        source=reading.source,
        cached_tokens=int(reading.cached_tokens),
        moved_tokens=int(max(0.0, prices.prompt.tokens - stored)),
        items=(
            (Item.QUEUE, readers.queue_s[reader]),
            (Item.SOURCE, reading.source_s),
            (Item.PREFILL, reading.prefill_s),
            (Item.TRANSFER, moved_s),
            (Item.DECODE_WAIT, writing.wait_s + prices.behind_s(reader, writer, reading, moved_s)),
            (Item.ANSWER, writers.answer_s[writer]),
            (Item.HARM, writing.harm_s + readers.passed[reader] * reading.prefill_s),
            (Item.EFFORT, EFFORT_SHARE * reading.prefill_s),
            (Item.PRESSURE, writing.pressure_s),
        ),
        tpot_s=writing.step_s,
    )
