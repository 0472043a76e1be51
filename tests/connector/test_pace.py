"""How often a load is looked at, and how late its last layer is found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kvrelay.connector.pace import LATE_POLL_S, LONGEST_POLL_S, POLL_S, Pace

LAYERS = 30
LOOK_S = 0.00002


def looks(arrivals: Sequence[float], look_s: float = LOOK_S) -> tuple[int, float]:
    """How often a thread wakes to find layers that come in at these times, and how late it finds the last one."""
    now, wakes, left = 0.0, 0, list(arrivals)
    pace = Pace(len(left), now)
    while left:
        if left[0] <= now:
            left.pop(0)
            pace.moved()
            continue
        pace.missed(now)
        now += look_s + pace.pause_s(look_s)
        wakes += 1
    return wakes, now - arrivals[-1]


def steady(layer_s: float, unevenness: float = 0.0, wait_s: float = 0.0) -> list[float]:
    chance = random.Random(1)
    return list(
        itertools.accumulate(
            (layer_s * (1 + unevenness * chance.uniform(-1, 1)) for _ in range(LAYERS)), initial=wait_s
        )
    )[1:]


@pytest.mark.parametrize("unevenness", [0.0, 0.5])
@pytest.mark.parametrize("layer_s", [0.001, 0.004, 0.03, 0.15])
def test_looks_are_few_and_the_last_layer_is_found_soon(layer_s: float, unevenness: float) -> None:
    arrivals = steady(layer_s, unevenness)
    wakes, late_s = looks(arrivals)
    assert wakes <= LAYERS + 60 + arrivals[-1] / LONGEST_POLL_S
    assert late_s <= 2 * POLL_S


@pytest.mark.parametrize("unevenness", [0.0, 0.5])
def test_of_slow_layers_the_first_is_looked_for_often_and_the_last_found_as_soon_as_one_without_a_pace(
    unevenness: float,
) -> None:
    """No pace is known before the second one, and the last but one is seen up to the longest pause after it came: the
    last is foreseen so much too early."""
    arrivals = steady(0.5, unevenness)
    wakes, late_s = looks(arrivals)
    assert wakes <= LAYERS + 60 + arrivals[0] / LATE_POLL_S + arrivals[-1] / LONGEST_POLL_S
    assert late_s <= LATE_POLL_S


def test_layers_that_are_all_in_wake_nobody() -> None:
    assert looks([0.0] * LAYERS) == (0, 0.0)


@pytest.mark.parametrize("wait_s", [0.1, 2.0, 30.0])
def test_layers_that_come_at_once_after_a_wait_are_found_soon(wait_s: float) -> None:
    _wakes, late_s = looks([wait_s] * LAYERS)
    assert late_s <= LATE_POLL_S + LOOK_S


def test_the_wait_for_the_first_layer_does_not_count_as_the_pace() -> None:
    _wakes, late_s = looks(steady(0.004, wait_s=2.0))
    assert late_s <= LATE_POLL_S


def test_layers_that_come_faster_than_the_ones_before_are_found_within_the_longest_pause() -> None:
    arrivals = [*steady(0.15)[: LAYERS // 2], *[LAYERS // 2 * 0.15 + 0.01] * (LAYERS // 2)]
    _wakes, late_s = looks(arrivals)
    assert late_s <= LONGEST_POLL_S + LOOK_S


def test_a_load_that_stopped_is_looked_at_rarely() -> None:
    pace = Pace(LAYERS, 0.0)
    pace.missed(5.0)
    assert pace.pause_s(LOOK_S) == LATE_POLL_S


@pytest.mark.parametrize("look_s", [LOOK_S, 0.0001, 0.0005, 0.003, 0.03])
def test_looks_that_many_loads_make_long_leave_the_engine_ten_times_as_long_up_to_the_late_pause(look_s: float) -> None:
    assert Pace(LAYERS, 0.0).pause_s(look_s) >= min(10 * look_s, LATE_POLL_S)


@pytest.mark.parametrize("now", [0.0, 0.1, 5.0])
def test_a_look_that_was_held_up_does_not_make_the_loader_blind(now: float) -> None:
    pace = Pace(LAYERS, 0.0)
    pace.missed(now)
    assert pace.pause_s(0.03) <= LATE_POLL_S
