"""Deficit round robin, as a table and over time."""

from __future__ import annotations

import pytest

from kvrelay.policy.fair import QUANTUM_S, Line, Share, ahead_s, next_turn


def share(head_s: float, credit_s: float = 0.0, weight: float = 1.0) -> Share:
    return Share(credit_s=credit_s, head_s=head_s, weight=weight)


@pytest.mark.parametrize(
    ("shares", "position"),
    [
        ([share(1.0)], 0),
        ([share(1.0), share(1.0)], 0),
        ([share(1.0), share(0.5)], 1),
        ([share(1.0, credit_s=0.6), share(0.5)], 0),
        ([share(1.0), share(1.0, weight=2.0)], 1),
        ([share(0.0, credit_s=-1.0), share(0.5)], 1),
    ],
)
def test_who_can_pay_first_is_served(shares: list[Share], position: int) -> None:
    assert next_turn(shares).position == position


def test_all_gain_what_the_rounds_are_worth_and_the_served_one_pays() -> None:
    turn = next_turn([share(1.0), share(0.5, weight=2.0)])
    rounds = 0.5 / (2 * QUANTUM_S)
    assert turn.credits_s == pytest.approx((rounds * QUANTUM_S, 0.0))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_in_the_long_run_time_is_shared_by_weight_whatever_the_prompts(weights: tuple[float, float]) -> None:
    costs, credits_s, served_s = (2.0, 0.1), [0.0, 0.0], [0.0, 0.0]
    for _ in range(2000):
        turn = next_turn([share(costs[i], credits_s[i], weights[i]) for i in (0, 1)])
        credits_s = list(turn.credits_s)
        served_s[turn.position] += costs[turn.position]
    assert served_s[0] / served_s[1] == pytest.approx(weights[0] / weights[1], rel=0.05)


def line(waiting_s: float, weight: float = 1.0) -> Line:
    return Line(waiting_s=waiting_s, weight=weight)


@pytest.mark.parametrize(
    ("own", "others", "ahead"),
    [
        (line(5.0), [], 5.0),
        # Whoever has nothing waiting is served after as much of each other line as it wants itself,
        (line(0.0), [line(99.0)], 1.0),
        (line(0.0), [line(99.0), line(99.0)], 2.0),
        # who has much waits for its own, and for as much of each other line,
        (line(4.0), [line(99.0)], 4.0 + 5.0),
        # of which nobody is served more than it has.
        (line(4.0), [line(2.0)], 4.0 + 2.0),
        (line(4.0), [line(99.0, weight=3.0)], 4.0 + 15.0),
        (line(4.0, weight=2.0), [line(99.0)], 4.0 + 2.5),
    ],
)
def test_others_go_first_by_their_weight_and_no_further_than_their_work(
    own: Line, others: list[Line], ahead: float
) -> None:
    assert ahead_s(own, 1.0, others) == ahead
