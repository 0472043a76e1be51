"""Choose where one prompt is computed and where its answer is written, by predicted seconds. All ways compete in one
sum, and the runners-up are kept. It must never reserve anything."""

from __future__ import annotations

from enum import StrEnum

from kvrelay.policy.cost import EFFORT_SHARE, OWN, DecodeColumns, Item, PrefillColumns, Prompt, Source, Ways, harmed
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
    """None: the decode worker computes the prompt itself."""
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


def choose(prompt: Prompt, prefills: PrefillColumns, decodes: DecodeColumns, ways: Ways) -> Decision | None:
    """The cheapest (prefill worker, decode worker, path); None when no way is allowed."""
    prices = Prices(prompt, prefills, decodes, ways)
    chosen = prices.cheapest()
    if chosen is None:
        return None
    others = [place for place in prices.ranked() if place != chosen]
    return Decision(chosen=_option(prices, *chosen), runners_up=tuple(_option(prices, *place) for place in others))


def _option(prices: Prices, prefill: int, decode: int) -> Option:
    """The place with its reasons."""
    return _local(prices, decode) if prefill == LOCAL else _remote(prices, prefill, decode)


def _local(prices: Prices, at: int) -> Option:
    decodes, own, decode_cost = prices.decodes, prices.own_prefill_cost(at), prices.decode_costs[at]
    return Option(
        path=Path.LOCAL,
        prefill=None,
        decode=decodes.as_prefills.names[at],
        source=own.source,
        cached_tokens=int(own.cached_tokens),
        moved_tokens=0,
        items=(
            (Item.SOURCE, own.source_s),
            (Item.PREFILL, own.prefill_s),
            (Item.DECODE_WAIT, decode_cost.wait_s + prices.own_wait_s(at, own)),
            (Item.ANSWER, decodes.answer_s[at]),
            (Item.HARM, decode_cost.harm_s + harmed(decodes, at) * own.prefill_s),
            (Item.PRESSURE, decode_cost.pressure_s),
        ),
        tpot_s=decode_cost.step_s,
    )


def _remote(prices: Prices, prefill: int, decode: int) -> Option:
    prefills, decodes, decode_cost = prices.prefills, prices.decodes, prices.decode_costs[decode]
    prefill_cost, moved_s = prices.prefill_cost(prefill), prices.moved_s(prefill, decode)
    stored = prices.ways.stored_tokens[prefill][decode]
    return Option(
        path=Path.REMOTE_PREFILL,
        prefill=prefills.names[prefill],
        decode=decodes.as_prefills.names[decode],
        source=prefill_cost.source,
        cached_tokens=int(prefill_cost.cached_tokens),
        moved_tokens=int(max(0.0, prices.prompt.tokens - stored)),
        items=(
            (Item.QUEUE, prefills.queue_s[prefill]),
            (Item.SOURCE, prefill_cost.source_s),
            (Item.PREFILL, prefill_cost.prefill_s),
            (Item.TRANSFER, moved_s),
            (Item.DECODE_WAIT, decode_cost.wait_s + prices.behind_s(prefill, decode, prefill_cost, moved_s)),
            (Item.ANSWER, decodes.answer_s[decode]),
            (Item.HARM, decode_cost.harm_s + prefills.passed[prefill] * prefill_cost.prefill_s),
            (Item.EFFORT, EFFORT_SHARE * prefill_cost.prefill_s),
            (Item.PRESSURE, decode_cost.pressure_s),
        ),
        tpot_s=decode_cost.step_s,
    )
