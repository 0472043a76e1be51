"""How long a prompt waits behind others."""

from __future__ import annotations

import math

import pytest

from kvrelay.fleet.backlog import Backlog, Promise


def backlog(*seconds: float, expires: bool = False) -> Backlog:
    made = Backlog()
    for number, each in enumerate(seconds):
        made.add(str(number), Promise(seconds=each, expires=expires), 10.0)
    return made


def test_the_first_prompt_gets_shorter_with_time_and_the_others_do_not() -> None:
    line = backlog(2.0, 3.0)
    assert [line.wait_s(now) for now in (10.0, 11.0, 12.0, 99.0)] == [5.0, 4.0, 3.0, 3.0]


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
    ("at_most_s", "now", "wait_s"), [(math.inf, 10.0, 5.0), (0.1, 10.0, 0.2), (2.5, 11.0, 3.5), (0.5, 12.0, 0.5)]
)
def test_a_short_prompt_is_delayed_by_each_long_one_only_while_it_is_computed(
    at_most_s: float, now: float, wait_s: float
) -> None:
    assert backlog(2.0, 3.0).wait_s(now, at_most_s) == pytest.approx(wait_s)


def test_its_repr_is_a_status_line() -> None:
    assert repr(backlog(2.0, 3.0)) == "<Backlog 2 prompts, 5.000 s>"
