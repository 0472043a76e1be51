"""Least work wins; equals take turns; the others are kept."""

from __future__ import annotations

import pytest

from kvrelay.policy.cost import DecodeLoad, PrefillLoad
from kvrelay.policy.route import choose_decode, choose_prefill


def prefill(worker: str, queued: int = 0, cached: int = 0, last_chosen: int = 0) -> PrefillLoad:
    return PrefillLoad(worker=worker, queued_tokens=queued, cached_tokens=cached, last_chosen=last_chosen)


def decode(worker: str, sequences: int = 0, kv: int = 0, capacity: int = 1000, last_chosen: int = 0) -> DecodeLoad:
    return DecodeLoad(
        worker=worker, sequences=sequences, kv_tokens=kv, kv_capacity_tokens=capacity, last_chosen=last_chosen
    )


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([prefill("a", 10), prefill("b", 9)], "b"),
        ([prefill("a"), prefill("b", cached=64)], "b"),
        # A hot prefix is worth its tokens and no more: a longer queue sends it elsewhere.
        ([prefill("a"), prefill("b", queued=63, cached=64)], "b"),
        ([prefill("a"), prefill("b", queued=65, cached=64)], "a"),
        ([prefill("a", last_chosen=2), prefill("b", last_chosen=1)], "b"),
        ([prefill("b"), prefill("a")], "a"),
    ],
)
def test_the_p_with_the_least_uncached_work_is_chosen(loads: list[PrefillLoad], chosen: str) -> None:
    choice = choose_prefill(loads, 100)
    assert choice is not None
    assert choice.worker == chosen
    assert [other.worker for other in choice.runners_up] == [load.worker for load in loads if load.worker != chosen]


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([decode("a", 2), decode("b", 1)], "b"),
        # A nearly full worker is avoided although it runs fewer sequences.
        ([decode("a", 1, kv=940), decode("b", 5, kv=100)], "b"),
        # The same tokens weigh less on a larger pool.
        ([decode("a", 1, kv=500), decode("b", 1, kv=500, capacity=4000)], "b"),
        ([decode("a", last_chosen=9), decode("b", last_chosen=8)], "b"),
    ],
)
def test_the_d_that_is_disturbed_least_is_chosen(loads: list[DecodeLoad], chosen: str) -> None:
    choice = choose_decode(loads, sequences=1, kv_tokens=50)
    assert choice is not None
    assert choice.worker == chosen


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose_prefill([], 10) is None
    assert choose_decode([], 1, 10) is None
