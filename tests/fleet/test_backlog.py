"""How long a prompt waits behind others."""

from __future__ import annotations

import math

import pytest

from kvrelay.fleet.backlog import Backlog, Promise
from kvrelay.fleet.loads import Loads, PrefillReservation

STEP_S = 0.5


def backlog(*seconds: float, step_s: float = 0.0, expires: bool = False) -> Backlog:
    made = Backlog()
    for number, each in enumerate(seconds):
        made.add(str(number), Promise(seconds=each, step_s=step_s, expires=expires), 10.0)
    return made


def reservation(key: str, seconds: float) -> PrefillReservation:
    return PrefillReservation(worker="p", key=key, tokens=1, seconds=seconds, step_s=STEP_S, source="s1", target="s2")


def test_the_first_prompt_gets_shorter_with_time_and_the_others_do_not() -> None:
    line = backlog(2.0, 3.0)
    assert [line.wait_s(now) for now in (10.0, 11.0, 12.0)] == [5.0, 4.0, 3.0]


@pytest.mark.parametrize("own_s", [math.inf, 0.1])
def test_a_prompt_that_is_late_by_some_time_is_expected_to_take_that_long_again(own_s: float) -> None:
    line = backlog(2.0, 3.0, step_s=STEP_S)
    assert [line.wait_s(now, own_s) for now in (13.0, 99.0)] == [4.0, 90.0]


def test_what_is_done_early_or_late_counts_from_that_moment() -> None:
    line = backlog(2.0, 3.0)
    line.computed("0", 10.5)
    assert (line.wait_s(10.5), line.wait_s(11.5)) == (3.0, 2.0)
    line.computed("1", 20.0)
    line.computed("1", 21.0)
    line.withdrawn("1", 22.0)
    assert (line.wait_s(20.0), len(line)) == (0.0, 0)


def test_who_gives_up_in_the_middle_takes_his_seconds_with_him() -> None:
    line = backlog(2.0, 3.0, 4.0)
    line.withdrawn("1", 11.0)
    assert line.wait_s(11.0) == 5.0


def test_a_prompt_that_nobody_tells_of_is_done_when_its_time_has_passed() -> None:
    line = backlog(2.0, 3.0, expires=True)
    assert [line.wait_s(now) for now in (10.0, 12.5, 14.0, 15.0)] == [5.0, 2.5, 1.0, 0.0]
    assert len(line) == 0
    line.add("2", Promise(seconds=1.0), 20.0)
    assert line.wait_s(20.5) == 0.5


@pytest.mark.parametrize(
    ("own_s", "now", "wait_s"),
    [
        (math.inf, 10.0, 6.0),
        (1.0, 10.0, 6.0),  # not much shorter than any
        (0.5, 10.0, 1.25),  # much shorter than both long ones: the first is half through a step, the second stands back
        (0.5, 11.875, 1.125),  # it is almost done
        (0.2, 10.0, 0.25),
    ],
)
def test_a_short_prompt_waits_for_a_step_of_much_longer_ones_and_for_the_others(
    own_s: float, now: float, wait_s: float
) -> None:
    line = backlog(2.0, 3.0, 1.0, step_s=STEP_S)
    assert line.wait_s(now, own_s) == pytest.approx(wait_s)


@pytest.mark.parametrize(("own_s", "many"), [(math.inf, 0), (1.0, 0), (0.75, 1), (0.5, 2), (0.25, 3)])
def test_who_is_much_shorter_is_stood_back_for(own_s: float, many: int) -> None:
    assert backlog(2.0, 3.0, 1.0, step_s=STEP_S).passed(own_s, 10.0) == many
    assert backlog(2.0, 3.0, 1.0).passed(own_s, 10.0) == 0, "an engine that computes in strict order"


@pytest.mark.parametrize(("now", "many"), [(10.0, 2), (11.0, 1), (11.5, 1), (13.0, 0)])
def test_who_is_almost_done_or_late_stands_back_for_nobody(now: float, many: int) -> None:
    """The wait counts it then."""
    line = backlog(2.0, 3.0, step_s=STEP_S)
    assert line.passed(0.5, now) == many


def test_who_is_done_as_far_as_anybody_knows_stands_back_for_nobody() -> None:
    line = backlog(10.0, 20.0, step_s=STEP_S, expires=True)
    assert [line.passed(0.1, now) for now in (10.0, 21.0, 100.0)] == [2, 1, 0]


@pytest.mark.parametrize(("step_s", "left_s"), [(STEP_S, 2.0), (0.0, 1.5)])
def test_a_long_prompt_stands_still_while_a_short_one_passes_it(step_s: float, left_s: float) -> None:
    line = backlog(3.0, step_s=step_s)
    line.add("short", Promise(seconds=0.5, step_s=step_s), 10.25)
    line.computed("short", 11.5)
    assert line.wait_s(11.5) == left_s


def test_nobody_stands_still_for_a_prompt_that_is_not_computed() -> None:
    line = backlog(3.0, step_s=STEP_S)
    line.add("short", Promise(seconds=0.5, step_s=STEP_S), 10.25)
    line.withdrawn("short", 11.5)
    assert line.wait_s(11.5) == 1.5


@pytest.mark.parametrize("ends", ["hold", "release"])
def test_prompts_that_are_held_back_or_given_up_do_not_delay_those_that_are_computed(ends: str) -> None:
    loads = Loads()
    loads.reserve_prefill(reservation("long", 10.0), 0.0)
    for number in range(10):
        short = reservation(str(number), 1.0)
        loads.reserve_prefill(short, 5.0)
        if ends == "hold":
            loads.hold(short, 5.0)
        loads.release_prefill(short, 5.0)
    assert loads.wait_s("p", 5.0) == 5.0
    short = reservation("computed", 1.0)
    loads.reserve_prefill(short, 5.0)
    loads.computed(short, 6.0)
    loads.release_prefill(short, 6.0)
    assert loads.wait_s("p", 6.0) == 5.0


def test_its_repr_is_a_status_line() -> None:
    assert repr(backlog(2.0, 3.0)) == "<Backlog 2 prompts, 5.000 s>"
