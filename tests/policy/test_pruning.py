"""A choice that prices few pairs is the choice among all of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product

import msgspec
import pytest

from kvrelay.policy import bounds, decode_costs
from kvrelay.policy.bounds import least_prefill_s
from kvrelay.policy.cost import (
    Coming,
    DecodeColumns,
    Hints,
    Kind,
    Offer,
    PrefillColumns,
    PrefillCost,
    Prompt,
    Source,
    Ways,
    between_chunks_s,
    harmed,
    prefill_cost,
    prefill_price,
)
from kvrelay.policy.decode_costs import DecodeCosts, decode_cost
from kvrelay.policy.laws import MANY, Laws
from kvrelay.policy.prices import EQUAL_SHARE, RUNNERS_UP
from kvrelay.policy.route import Option, choose
from tests.policy.values import hints_of, prompt

STORES = 6
Way = tuple[str | None, str]


class State:
    """Workers, ways and a prompt, as far apart as they may be."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.prompt: Prompt = prompt(dice.choice((1, 40, 1000, 10_000)), output_tokens=dice.choice((1.0, 200.0)))
        self.prefills = self._prefill_columns("p", dice.choice((*range(9), MANY, MANY + 5)))
        self.decodes = self._decode_columns(dice.choice((*range(1, 9), MANY, MANY + 5)))
        self.ways = self._ways(len(self.prefills.names), len(self.decodes.as_prefills.names))

    def _few(self, count: int, *values: float) -> list[float]:
        """Of few values, so that there are equals, some of them a little apart."""
        return [
            self.dice.choice(values) * self.dice.choice((1.0, 1.0, self.dice.uniform(1.0, 1.02))) for _ in range(count)
        ]

    def _prefill_columns(self, prefix: str, count: int) -> PrefillColumns:
        offers = [self._offers() for _ in range(count)]
        return PrefillColumns(
            names=[f"{prefix}{number}" for number in range(count)],
            rates=Laws([(*self._few(1, 0.0, 0.01), *self._few(1, 1e-4, 1e-3), 1e-8) for _ in range(count)]),
            queue_s=self._few(count, 0.0, 0.0, 0.1, 3.0),
            passed=[self.dice.choice((0, 0, 0, 1, 3)) for _ in range(count)],
            offers=offers,
            hints=hints_of([self._better(each) for each in offers]),
            token_bytes=self._few(count, 1e3, 1e5),
            last_chosen=[self.dice.randrange(5) for _ in range(count)],
        )

    def _offers(self) -> list[Offer]:
        tokens = self.prompt.tokens
        found: list[Offer] = [(Source(Kind.ENGINE), self.dice.choice((0, 0, tokens // 2, tokens)), 0.0)]
        for number in range(self.dice.randrange(3)):
            length, seconds = self.dice.choice((0, tokens // 3, tokens)), self.dice.choice((0.0, 0.05, 2.0))
            found.append((Source(Kind.PEER, f"s{number}"), length, seconds))
        return found

    def _better(self, offers: list[Offer]) -> list[Offer]:
        """The same, or better."""
        more, share = self.dice.choice((0, 0, self.prompt.tokens)), self.dice.choice((0.0, 0.5, 1.0))
        return [(source, tokens + more, share * seconds) for source, tokens, seconds in offers]

    def any_hints(self) -> Hints:
        """Of prefixes that come to some of the prefill workers, to all, or to none."""
        count, dice = len(self.prefills.names), self.dice
        coming = [
            Coming(
                to=sorted(dice.sample(range(count), dice.choice((0, count, dice.randint(0, count))))),
                pages=dice.randrange(1, 20),
                tokens=dice.choice((0, 1, self.prompt.tokens // 2, self.prompt.tokens)),
                first_s=dice.choice((0.0, 0.01, 1.0)),
                page_s=dice.choice((0.0, 1e-3, 0.1)),
            )
            for _ in range(dice.randrange(4))
        ]
        at_hand = [dice.choice((0, self.prompt.tokens // 3, self.prompt.tokens)) for _ in range(count)]
        return Hints(at_hand=at_hand, stored=[dice.randrange(25) for _ in range(count)], coming=coming)

    def _decode_columns(self, count: int) -> DecodeColumns:
        return DecodeColumns(
            as_prefills=self._prefill_columns("d", count),
            step_rates=Laws([(0.01, 1e-3, 1e-6)] * count),
            answer_s=self._few(count, 0.01, 0.02),
            sequences=self._few(count, 0.0, 0.0, 4.0, 30.0),
            running=self._few(count, 1.0, 1.0, 4.0, 30.0),
            kv_tokens=self._few(count, 0.0, 1e4, 9e4),
            kv_capacity_tokens=self._few(count, 1e5, 1e5, 2e4),
            remaining_tokens=self.dice.choice((0.5, 100.0)),
            computes=[at for at in range(count) if self.dice.random() < 0.5],
            chunk_tokens=self._few(count, 32.0, 512.0, math.inf),
        )

    def _ways(self, prefills: int, decodes: int) -> Ways:
        latency_s = [self._few(STORES, 1e-5, 5e-3, 0.05) for _ in range(STORES)]
        sources = [self.dice.randrange(STORES) for _ in range(prefills)]
        return Ways(
            prefills=[at for at in range(prefills) if self.dice.random() < 0.9],
            decodes=[at for at in range(decodes) if self.dice.random() < 0.9],
            allowed=[[self.dice.random() < 0.9 for _ in range(decodes)] for _ in range(prefills)],
            sources=sources,
            targets=[self.dice.randrange(STORES) for _ in range(decodes)],
            latency_s=latency_s,
            s_per_byte=[self._few(STORES, 1e-10, 1e-9, 1e-6) for _ in range(STORES)],
            in_flight_bytes=[self._few(STORES, 0.0, 1e6) for _ in range(STORES)],
            least_s=[min(latency_s[source]) for source in sources],
            stored_tokens=[self._few(decodes, 0.0, 500.0) for _ in range(prefills)],
        )

    # ------------------------------------------------------------ all of it

    def remote(self) -> Iterator[tuple[float, float, Way]]:
        """Total, the prefill worker's part of it, and way, of every pair."""
        for prefill, decode in product(self.ways.prefills, self.ways.decodes):
            if self.ways.allowed[prefill][decode]:
                price = prefill_price(self.prefills, prefill)
                cost = prefill_cost(self.prompt, self.prefills, prefill, price)
                moved_s = self.moved_s(cost, prefill, decode)
                priced_s = self.prefills.queue_s[prefill] + cost.source_s + price * cost.prefill_s
                way = self.prefills.names[prefill], self.decodes.as_prefills.names[decode]
                ready_s = self.prefills.queue_s[prefill] + cost.source_s + cost.prefill_s + moved_s
                behind_s = max(0.0, self.decodes.as_prefills.queue_s[decode] - ready_s)
                yield priced_s + moved_s + behind_s + self.decode_s(decode), priced_s, way

    def moved_s(self, cost: PrefillCost, prefill: int, decode: int) -> float:
        source, target = self.ways.sources[prefill], self.ways.targets[decode]
        lacking = max(0.0, self.prompt.tokens - self.ways.stored_tokens[prefill][decode])
        size_bytes = lacking * self.prefills.token_bytes[prefill] + self.ways.in_flight_bytes[source][target]
        exposed_s = self.ways.s_per_byte[source][target] * size_bytes - cost.prefill_s
        return self.ways.latency_s[source][target] + max(0.0, exposed_s)

    def local(self) -> Iterator[tuple[float, float, Way]]:
        """The same of decode workers that compute the prompt themselves; the whole is their part."""
        for at in self.decodes.computes:
            price = 1.0 + harmed(self.decodes, at)
            own = prefill_cost(self.prompt, self.decodes.as_prefills, at, price)
            wait_s = self.decodes.as_prefills.queue_s[at] + between_chunks_s(self.prompt, self.decodes, at, own)
            total_s = wait_s + own.source_s + price * own.prefill_s + self.decode_s(at)
            yield total_s, total_s, (None, self.decodes.as_prefills.names[at])

    def decode_s(self, at: int) -> float:
        cost = decode_cost(self.prompt, self.decodes, at)
        return cost.wait_s + self.decodes.answer_s[at] + cost.harm_s + cost.pressure_s

    def last_chosen(self, name: str | None) -> tuple[int, str]:
        workers = self.prefills if name is not None and name.startswith("p") else self.decodes.as_prefills
        assert name is not None
        return workers.last_chosen[list(workers.names).index(name)], name

    def chosen(self) -> Way | None:
        """The cheapest of all; equals take turns, prefill workers first."""
        remote, local = list(self.remote()), list(self.local())
        if not remote and not local:
            return None
        least_s, part_s, (prefill, decode) = min([*remote, *local], key=lambda each: each[0])
        if prefill is None:
            equal = [way for total_s, _, way in local if total_s <= least_s + EQUAL_SHARE * part_s]
            return min(equal, key=lambda way: self.last_chosen(way[1]))
        column = [(way, total_s) for total_s, _, way in remote if way[1] == decode]
        equal = [way for way, total_s in column if total_s <= least_s + EQUAL_SHARE * part_s]
        prefill = min(equal, key=lambda way: self.last_chosen(way[0]))[0]
        row = [(way, total_s, total_s - priced_s) for total_s, priced_s, way in remote if way[0] == prefill]
        best_s, rest_s = min(each[1:] for each in row)
        equal = [way for way, total_s, _ in row if total_s <= best_s + EQUAL_SHARE * rest_s]
        return min(equal, key=lambda way: self.last_chosen(way[1]))


def way_of(option: Option) -> Way:
    return option.prefill, option.decode


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(250, 2000, 250))]
)
def test_the_choice_and_the_runners_up_are_those_of_all_pairs(first: int) -> None:
    chosen = 0
    for seed in range(first, first + 250):
        state = State(seed)
        decision = choose(state.prompt, state.prefills, state.decodes, state.ways)
        assert (way_of(decision.chosen) if decision is not None else None) == state.chosen(), seed
        if decision is None:
            continue
        chosen += 1
        totals = {way: total_s for total_s, _, way in (*state.remote(), *state.local())}
        kept = [decision.chosen, *decision.runners_up]
        assert [option.total_s for option in kept] == pytest.approx([totals[way_of(option)] for option in kept])
        for option in decision.runners_up[: RUNNERS_UP - 1]:
            others = {way: total_s for way, total_s in totals.items() if way not in map(way_of, kept)}
            assert option.total_s <= min(others.values(), default=option.total_s) + 1e-9
        paths = {way[0] is None for way in totals}
        assert {option.prefill is None for option in kept} == paths, seed
    assert chosen > 200


def costs(state: State) -> tuple[list[float], list[float]]:
    price = [prefill_price(state.prefills, at) for at in range(len(state.prefills.names))]
    return DecodeCosts(state.prompt, state.decodes).seconds, least_prefill_s(state.prompt, state.prefills, price)


def test_in_arrays_workers_cost_what_they_do_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(300):
        state, found = State(seed), []
        state.prefills = msgspec.structs.replace(state.prefills, hints=state.any_hints())
        for many in (1, 1000):
            monkeypatch.setattr(decode_costs, "MANY", many)
            monkeypatch.setattr(bounds, "MANY", many)
            found.append(costs(state))
        assert found[0] == found[1], seed
        assert found[0][0] == [state.decode_s(at) for at in range(len(found[0][0]))], seed


def test_no_worker_costs_less_than_it_is_said_to_at_least() -> None:
    for seed in range(300):
        state = State(seed)
        for at, least_s in enumerate(costs(state)[1]):
            price = prefill_price(state.prefills, at)
            cost = prefill_cost(state.prompt, state.prefills, at, price)
            assert least_s <= cost.source_s + price * cost.prefill_s, seed
