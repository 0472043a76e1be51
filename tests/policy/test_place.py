"""When a second copy is worth its bytes."""

from __future__ import annotations

import math

import pytest

from kvrelay.policy.place import KEEP_FREE_SHARE, Budget, Room, Stake, is_worth_it, price_s_per_byte, value_s_per_byte

STAKE = Stake(seconds=2.0, bytes=100, left_s=10.0)
IDLE = Room(free_share=0.5, waiting_s=0.0, copy_s=0.1)


def test_the_value_is_what_a_death_costs_times_its_probability() -> None:
    assert value_s_per_byte(STAKE, deaths_per_s=1e-6) == pytest.approx(1e-5 * 2.0 / 100, rel=1e-4)
    assert value_s_per_byte(STAKE, deaths_per_s=1e9) == 2.0 / 100, "it dies at most once"


@pytest.mark.parametrize(
    ("stake", "room", "worth"),
    [
        ({}, {}, True),
        ({"seconds": 0.0}, {}, False),
        ({"left_s": 0.0}, {}, False),
        ({"bytes": 0}, {}, False),
        ({}, {"free_share": KEEP_FREE_SHARE}, True),
        ({}, {"free_share": KEEP_FREE_SHARE - 0.01}, False),
        ({}, {"waiting_s": 0.01}, False),
        ({"left_s": 1e7, "seconds": 9.0}, {"waiting_s": 0.01}, True),
    ],
)
def test_a_copy_takes_what_nobody_else_wants(stake: dict[str, float], room: dict[str, float], worth: bool) -> None:
    at_stake = Stake(**{"seconds": 2.0, "bytes": 100, "left_s": 10.0} | stake)  # type: ignore[arg-type]
    place = Room(**{"free_share": 0.5, "waiting_s": 0.0, "copy_s": 0.1} | room)
    assert is_worth_it(at_stake, place) is worth


def test_sharing_a_link_costs_no_more_than_the_copy_takes() -> None:
    assert price_s_per_byte(STAKE, Room(free_share=1.0, waiting_s=9.0, copy_s=0.2)) == 0.2 / 100
    assert price_s_per_byte(STAKE, Room(free_share=0.0, waiting_s=0.0, copy_s=0.2)) == math.inf


def test_a_budget_lets_so_many_bytes_a_second_through() -> None:
    budget, copied = Budget(bytes_per_s=100.0), 0
    for tenth in range(100):
        if budget.allows(tenth / 10):
            budget = budget.spend(40, tenth / 10)
            copied += 40
    assert 1000 <= copied <= 1000 + 100 + 40
    assert not Budget(bytes_per_s=0.0).allows(0.0)
