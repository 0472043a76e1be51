"""Laws that learn: from nothing, through outliers, after a change."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest

from kvrelay.policy.fit import UNKNOWN_ERROR, Fit, start

Law = Callable[[float, float], float]
TRUTH = (0.01, 2e-4, 1e-8)


def law(new: float, past: float, rates: tuple[float, ...] = TRUTH) -> float:
    return rates[0] + rates[1] * new + rates[2] * new * (past + new / 2)


def amounts(new: float, past: float) -> tuple[float, float, float]:
    return 1.0, new, new * (past + new / 2)


def learned(
    fit: Fit, count: int, *, noise: float = 0.05, outliers: float = 0.0, slower: float = 1.0, seed: int = 1
) -> Fit:
    chance = random.Random(seed)
    for _ in range(count):
        new, past = chance.choice((32, 200, 1500, 8000)), chance.choice((0, 0, 1000, 16000))
        seconds = law(new, past) * slower * chance.lognormvariate(0.0, noise)
        if chance.random() < outliers:
            seconds *= chance.choice((0.05, 5.0, 20.0))
        fit = fit.observe(amounts(new, past), seconds)
    return fit


def worst(fit: Fit, slower: float = 1.0) -> float:
    """Largest relative error over the range."""
    points = [(new, past) for new in (64, 500, 4000, 16000) for past in (0, 4000)]
    return max(abs(fit.seconds(*amounts(*point)) / (slower * law(*point)) - 1) for point in points)


@pytest.mark.parametrize("factor", [0.05, 1.0, 30.0])
@pytest.mark.parametrize(("count", "within"), [(3, 0.5), (20, 0.12), (200, 0.06)])
def test_a_seed_that_is_wrong_by_a_factor_is_put_right_in_a_few_observations(
    factor: float, count: int, within: float
) -> None:
    fit = start(*(factor * rate for rate in TRUTH))
    assert worst(learned(fit, count)) < within


def test_a_seed_of_the_wrong_shape_is_put_right_too() -> None:
    assert worst(learned(start(0.1, 2e-5, 1e-7), 200, noise=0.01)) < 0.1


@pytest.mark.parametrize("outliers", [0.05, 0.15])
def test_outliers_do_not_bend_it(outliers: float) -> None:
    assert worst(learned(start(*TRUTH), 300, outliers=outliers)) < 0.15


@pytest.mark.parametrize("slower", [0.4, 0.8, 1.3, 2.5])
@pytest.mark.parametrize(("count", "within"), [(12, 0.3), (100, 0.1)])
def test_a_machine_that_changed_is_learned_anew(slower: float, count: int, within: float) -> None:
    before = learned(start(*TRUTH), 300)
    assert worst(learned(before, count, slower=slower, seed=2), slower) < within


def test_seven_stalls_in_a_row_are_not_a_change() -> None:
    fit = learned(start(*TRUTH), 100)
    for _ in range(7):
        fit = fit.observe(amounts(1500, 0), 20 * law(1500, 0))
    assert worst(fit) < 0.5


@pytest.mark.parametrize("before", [20, 27])
def test_a_change_is_news_at_once_and_learned_after_eight_however_few_were_seen_before(before: int) -> None:
    fit = learned(start(*TRUTH), before, noise=0.01)
    for _ in range(3):
        assert fit.news(3) == 0.0
        fit = fit.observe(amounts(1500, 0), 10 * law(1500, 0))
    assert fit.news(3) == pytest.approx(math.log(10), rel=0.1)
    for _ in range(5):
        fit = fit.observe(amounts(1500, 0), 10 * law(1500, 0))
    assert worst(fit, slower=10) < 0.2


def test_inputs_that_never_vary_leave_the_others_at_the_seed_and_in_scale() -> None:
    fit = start(*TRUTH)
    for _ in range(5000):
        fit = fit.observe(amounts(500, 0), 2 * law(500, 0))
    assert fit.seconds(*amounts(500, 0)) == pytest.approx(2 * law(500, 0), rel=0.01)
    assert fit.seconds(*amounts(8000, 8000)) == pytest.approx(2 * law(8000, 8000), rel=0.3)


def test_no_rate_is_ever_negative() -> None:
    fit = start(1.0, 1.0)
    for amount, seconds in ((1.0, 10.0), (10.0, 1.0), (100.0, 0.5)) * 30:
        fit = fit.observe((1.0, amount), seconds)
        assert min(fit.rates) > 0.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_be_a_measurement_changes_nothing(seconds: float) -> None:
    fit = learned(start(*TRUTH), 10)
    assert fit.observe(amounts(100, 0), seconds) is fit
    assert fit.observe((0.0, 0.0, 0.0), 1.0) is fit


def test_it_states_its_error_and_knows_nothing_at_first() -> None:
    assert start(*TRUTH).error(0.5) == UNKNOWN_ERROR
    fit = learned(start(*TRUTH), 300, noise=0.1)
    assert 0.04 < fit.error(0.5) < 0.1  # the median of |ln| of such noise is 0.067
    assert fit.error(0.9) > fit.error(0.5)


def test_it_is_written_and_read_as_it_is() -> None:
    fit = learned(start(*TRUTH), 100)
    assert msgspec.json.decode(msgspec.json.encode(fit), type=Fit) == fit
