"""How long a prompt waits behind others."""

from __future__ import annotations

import math

import pytest

from kvrelay.fleet.backlog import Backlog, Promise

STEP_S = 0.5


def backlog(*seconds: float, step_s: float = 0.0, expires: bool = False) -> Backlog:
    made = Backlog()
    for number, each in enumerate(seconds):
        made.add(str(number), Promise(seconds=each, step_s=step_s, expires=expires), 10.0)
    return made


def test_the_first_prompt_gets_shorter_with_time_and_the_others_do_not() -> None:
    line = backlog(2.0, 3.0)
    assert [line.wait_s(now) for now in (10.0, 11.0, 12.0)] == [5.0, 4.0, 3.0]


@pytest.mark.parametrize("own_s", [math.inf, 0.1])
def test_a_prompt_that_is_late_by_some_time_is_expected_to_take_that_long_again(own_s: float) -> None:
    line = backlog(2.0, 3.0, step_s=STEP_S)
    assert [line.wait_s(now, own_s) for now in (13.0, 99.0)] == [4.0, 90.0]


def test_what_is_done_early_or_late_counts_from_that_moment() -> None:
    line = backlog(2.0, 3.0)
    line.remove("0", 10.5)
    assert (line.wait_s(10.5), line.wait_s(11.5)) == (3.0, 2.0)
    line.remove("1", 20.0)
    line.remove("1", 21.0)
    assert (line.wait_s(20.0), len(line)) == (0.0, 0)


def test_who_gives_up_in_the_middle_takes_his_seconds_with_him() -> None:
    line = backlog(2.0, 3.0, 4.0)
    line.remove("1", 11.0)
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
    assert backlog(2.0, 3.0, 1.0, step_s=STEP_S).passed(own_s) == many
    assert backlog(2.0, 3.0, 1.0).passed(own_s) == 0, "an engine that computes in strict order"


@pytest.mark.parametrize(("step_s", "left_s"), [(STEP_S, 2.0), (0.0, 1.5)])
def test_a_long_prompt_stands_still_while_a_short_one_passes_it(step_s: float, left_s: float) -> None:
    line = backlog(3.0, step_s=step_s)
    line.add("short", Promise(seconds=0.5, step_s=step_s), 10.25)
    line.remove("short", 11.5)
    assert line.wait_s(11.5) == left_s


def test_its_repr_is_a_status_line() -> None:
    assert repr(backlog(2.0, 3.0)) == "<Backlog 2 prompts, 5.000 s>"
