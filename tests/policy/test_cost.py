"""Costs as tables, with their boundaries."""

from __future__ import annotations

import math

import pytest

from kvrelay.policy.cost import (
    OWN,
    Item,
    Kind,
    between_chunks_s,
    harmed,
    prefill_cost,
    prefill_price,
    transfers_s,
    uncached_tokens,
)
from kvrelay.policy.decode_costs import decode_cost, kv_pressure
from tests.policy.values import decodes, prefills, prompt, source, ways


@pytest.mark.parametrize(("tokens", "cached", "left"), [(10, 0, 10), (10, 4, 6), (10, 10, 1), (10, 99, 1), (0, 0, 1)])
def test_p_always_computes_at_least_one_token(tokens: int, cached: int, left: int) -> None:
    assert uncached_tokens(tokens, cached) == left
    assert prefill_cost(prompt(tokens), prefills(1, cached=cached), 0).prefill_s == pytest.approx(left * 1e-3)


def test_the_items_of_the_request_itself_end_with_its_answer() -> None:
    assert OWN == (Item.QUEUE, Item.SOURCE, Item.PREFILL, Item.TRANSFER, Item.DECODE_WAIT, Item.ANSWER)


@pytest.mark.parametrize(
    ("queue_s", "held", "tier_tokens", "tier_s", "chosen", "source_s", "prefill_s"),
    [
        (0.0, 0, 0, 0.0, 0, 0.0, 1.0),
        (0.0, 0, 900, 0.2, 1, 0.2, 0.1),
        # What comes while the prompt queues costs nothing.
        (0.5, 0, 900, 0.2, 1, 0.0, 0.1),
        (0.1, 0, 900, 0.3, 1, 0.2, 0.1),
        # It is not worth the wait.
        (0.0, 0, 900, 0.95, 0, 0.0, 1.0),
        (0.0, 900, 900, 0.1, 0, 0.0, 0.1),
        (0.0, 900, 999, 0.05, 1, 0.05, 0.001),
    ],
)
def test_a_worker_takes_the_prefix_with_which_it_is_done_first(
    queue_s: float, held: int, tier_tokens: int, tier_s: float, chosen: int, source_s: float, prefill_s: float
) -> None:
    tier = source(Kind.STORE, [tier_tokens], [tier_s])
    cost = prefill_cost(prompt(1000), prefills(1, queue_s=queue_s, cached=held, more=[tier]), 0)
    assert cost.source.kind is [Kind.ENGINE, Kind.STORE][chosen]
    assert [cost.source_s, cost.prefill_s] == pytest.approx([source_s, prefill_s])


@pytest.mark.parametrize(
    ("bytes_per_s", "stored", "in_flight", "left_s"),
    [
        (1e9, 0, 0.0, 0.005),  # 1 MB in a second of prefill: hidden
        (1e6, 0, 0.0, 0.005),
        (5e5, 0, 0.0, 1.005),
        (5e5, 750, 0.0, 0.005),  # only what D's node lacks travels
        (5e5, 1000, 5e5, 0.005),
        (5e5, 1000, 1e6, 1.005),
    ],
)
def test_only_what_the_prefill_does_not_hide_is_paid_for(
    bytes_per_s: float, stored: int, in_flight: float, left_s: float
) -> None:
    there = prefills(1)
    link = ways(1, 1, bytes_per_s=bytes_per_s, in_flight=in_flight, stored=stored)
    prefill_s = prefill_cost(prompt(1000), there, 0).prefill_s
    assert transfers_s(prompt(1000), there, prefill_s, link, 0, [0]) == [pytest.approx(left_s)]


@pytest.mark.parametrize(
    ("used", "capacity", "price"),
    [(0, 100, 0.0), (50, 100, 0.01), (90, 100, 0.09), (100, 100, 1.0), (200, 100, 2.0), (0, 0, 0.0)],
)
def test_the_price_of_kv_rises_and_keeps_rising_over_the_brim(used: int, capacity: int, price: float) -> None:
    assert kv_pressure(used, capacity, max) == pytest.approx(price)


def test_a_request_pays_for_what_it_slows_down() -> None:
    there = decodes(2, sequences=[0, 10], kv=[0, 10_000])
    idle, busy = (decode_cost(prompt(1000), there, at).harm_s for at in (0, 1))
    assert idle == 0.0
    # One more sequence and 1,100 more tokens to read: 2.1 ms a step, for ten others, half of whose answers are written,
    # over a hundred tokens.
    assert busy == pytest.approx(0.0021 * 10 / 2 * 100)


@pytest.mark.parametrize(("kv", "share"), [(0, 0.0), (98_900, 0.0), (99_900, 1000 / 99_900), (200_000, 0.5055)])
def test_a_full_worker_makes_wait_for_the_blocks_that_lack(kv: int, share: float) -> None:
    cost = decode_cost(prompt(1000), decodes(1, sequences=10, kv=kv, remaining=50.0), 0)
    step_s = 0.01 + 10 * 1e-3 + kv * 1e-6
    assert cost.wait_s == pytest.approx(share * 50 * step_s, rel=1e-3)


@pytest.mark.parametrize(("running", "passed", "price"), [(1.0, 0, 0.5), (8.0, 0, 4.0), (8.0, 2, 6.0)])
def test_a_prompt_on_d_delays_half_of_each_running_answer_and_all_of_the_prompts_that_it_passes(
    running: float, passed: int, price: float
) -> None:
    assert harmed(decodes(1, running=running, passed=[passed]), 0) == price


@pytest.mark.parametrize(
    ("tokens", "cached", "chunk_tokens", "steps"),
    [(64, 0, math.inf, 0), (64, 0, 64, 0), (64, 0, 32, 1), (65, 0, 32, 2), (1000, 990, 32, 0)],
)
def test_between_its_chunks_a_prompt_on_d_waits_for_the_answers_there(
    tokens: int, cached: int, chunk_tokens: float, steps: int
) -> None:
    there = decodes(1, sequences=10, kv=10_000, chunk_tokens=chunk_tokens, cached=cached)
    own = prefill_cost(prompt(tokens), there.as_prefills, 0)
    assert between_chunks_s(prompt(tokens), there, 0, own) == pytest.approx(steps * (0.01 + 10 * 1e-3 + 10_000 * 1e-6))


@pytest.mark.parametrize(("passed", "price"), [(0, 1.1), (2, 3.1)])
def test_a_prompt_on_p_delays_those_that_it_passes_and_whoever_comes_next(passed: int, price: float) -> None:
    assert prefill_price(prefills(1, passed=[passed]), 0) == pytest.approx(price)
