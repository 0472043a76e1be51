"""Costs as tables, with their boundaries."""

from __future__ import annotations

import pytest

from kvrelay.policy.cost import DecodeLoad, PrefillLoad, decode_cost, kv_pressure, prefill_cost, uncached_tokens


@pytest.mark.parametrize(("prompt", "cached", "left"), [(10, 0, 10), (10, 4, 6), (10, 10, 1), (10, 99, 1), (0, 0, 1)])
def test_p_always_computes_at_least_one_token(prompt: int, cached: int, left: int) -> None:
    assert uncached_tokens(prompt, cached) == left


def test_a_prefill_costs_the_queue_and_its_own_uncached_tokens() -> None:
    cost = prefill_cost(PrefillLoad(worker="p", queued_tokens=100, cached_tokens=30, last_chosen=0), 50)
    assert cost.parts == (("queued_tokens", 100.0), ("prompt_tokens", 20.0))
    assert cost.total == 120.0


@pytest.mark.parametrize(
    ("used", "capacity", "price"), [(0, 100, 0.0), (50, 100, 1.0), (90, 100, 9.0), (100, 100, 100.0), (200, 100, 200.0)]
)
def test_the_price_of_kv_rises_and_keeps_rising_over_the_brim(used: int, capacity: int, price: float) -> None:
    assert kv_pressure(used, capacity) == pytest.approx(price)


def test_kv_pressure_survives_a_worker_without_kv() -> None:
    assert kv_pressure(0, 0) == 0.0


def test_a_decode_costs_the_sequences_it_joins_and_the_kv_it_takes() -> None:
    load = DecodeLoad(worker="d", sequences=3, kv_tokens=40, kv_capacity_tokens=100, last_chosen=0)
    cost = decode_cost(load, sequences=2, kv_tokens=10)
    assert cost.parts == (("sequences", 5.0), ("kv_pressure", 1.0))
