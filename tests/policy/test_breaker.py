"""When a worker is left alone, and when it is tried again."""

from __future__ import annotations

import pytest

from kvrelay.policy.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker, State


def after(failures: int, now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(failures):
        breaker = breaker.failed("x", now)
    return breaker


@pytest.mark.parametrize(
    ("failures", "state"), [(0, State.CLOSED), (FAILURES_TO_OPEN - 1, State.CLOSED), (FAILURES_TO_OPEN, State.OPEN)]
)
def test_failures_in_a_row_open_it(failures: int, state: State) -> None:
    assert after(failures).state is state


def test_a_success_between_them_starts_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(50):
        breaker = breaker.failed("x", 0.0).succeeded("y", 0.0)
    assert breaker == Breaker()


@pytest.mark.parametrize(("now", "allows"), [(0.0, False), (FIRST_PAUSE_S - 0.01, False), (FIRST_PAUSE_S, True)])
def test_an_open_one_allows_a_probe_after_its_pause(now: float, allows: bool) -> None:
    assert after(FAILURES_TO_OPEN).allows(now) is allows


def test_one_good_probe_closes_it_and_others_wait_for_it() -> None:
    probing = after(FAILURES_TO_OPEN).sent("r1")
    assert not probing.allows(100.0)
    assert probing.succeeded("r1", 1.0).allows(100.0)


def test_every_bad_probe_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now, pauses = after(FAILURES_TO_OPEN), 0.0, []
    for _ in range(8):
        pauses.append(breaker.wait_s(now))
        now += breaker.wait_s(now)
        breaker = breaker.sent("r1").failed("r1", now)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_failures_of_requests_that_were_on_their_way_do_not_lengthen_the_pause() -> None:
    assert after(50).wait_s(0.0) == FIRST_PAUSE_S


def test_a_probe_that_was_called_off_makes_room_for_another() -> None:
    breaker = after(FAILURES_TO_OPEN).sent("r1").gave_up("r1", 5.0)
    assert breaker.allows(5.0)
    assert breaker.sent("r1").failed("r1", 5.0).wait_s(5.0) == 2 * FIRST_PAUSE_S


def test_what_was_sent_before_the_probe_and_called_off_makes_room_for_nobody() -> None:
    probing = after(FAILURES_TO_OPEN).sent("probe")
    assert probing.gave_up("older", 5.0) == probing
    assert not probing.sent("late").gave_up("late", 5.0).allows(5.0)


def test_it_knows_since_when_nothing_has_succeeded() -> None:
    breaker = Breaker().failed("x", 3.0)
    for second in range(4, 12):
        breaker = breaker.failed("x", float(second))
    assert (breaker.state, breaker.failing_since_s) == (State.OPEN, 3.0)
    assert breaker.succeeded("y", 12.0).failed("x", 20.0).failing_since_s == 20.0


@pytest.mark.parametrize("failures", [1, FAILURES_TO_OPEN - 1, FAILURES_TO_OPEN])
def test_what_was_asked_before_it_began_to_fail_says_nothing_of_it(failures: int) -> None:
    breaker = after(failures, now=3.0)
    assert breaker.succeeded("old", asked_s=2.9) == breaker
    assert breaker.succeeded("new", asked_s=3.1) == Breaker()


@pytest.mark.parametrize(("key", "asked_s", "state"), [("old", 0.5, State.PROBING), ("probe", 0.5, State.CLOSED)])
def test_a_probe_counts_and_no_older_answer_does_meanwhile(key: str, asked_s: float, state: State) -> None:
    assert after(FAILURES_TO_OPEN, now=3.0).sent("probe").succeeded(key, asked_s).state is state


def test_an_older_failure_is_not_taken_for_the_probes() -> None:
    probing = after(FAILURES_TO_OPEN).sent("probe").failed("old", 1.0)
    assert (probing.state, probing.probe) == (State.PROBING, "probe")
    assert probing.failed("probe", 2.0).wait_s(2.0) == 2 * FIRST_PAUSE_S
    assert probing.succeeded("probe", 0.9) == Breaker()
