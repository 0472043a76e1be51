"""A step waits for the store once, whoever has asked: the running answers do not pay for each waiting request."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from kvrelay.connector.grace import GRACE_S, Grace
from kvrelay.protocol.client import Acquired
from tests.connector.fakes import FakeClient
from tests.connector.test_scheduler import Engine, prompt


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Answer(Future[Acquired]):
    """It comes ``after_s`` from when it is waited for, on a clock of its own."""

    def __init__(self, clock: Clock, after_s: float = 1e9) -> None:
        super().__init__()
        self.clock = clock
        self.after_s = after_s

    def result(self, timeout: float | None = None) -> Acquired:
        assert timeout is not None, "nothing may wait for ever"
        if not self.done() and self.after_s <= timeout:
            self.clock.now += self.after_s
            self.set_result(Acquired(id=1, pages=[], waiting=False))
        if not self.done():
            self.clock.now += timeout
            self.after_s -= timeout
            raise FutureTimeout
        return super().result()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def grace(clock: Clock) -> Grace:
    return Grace(clock)


def test_quick_answers_are_all_waited_for(clock: Clock, grace: Grace) -> None:
    answers = [grace.wait(Answer(clock, GRACE_S / 8), GRACE_S) for _ in range(7)]
    assert None not in answers


def test_the_answers_of_one_step_share_one_budget(clock: Clock, grace: Grace) -> None:
    for _ in range(50):
        grace.wait(Answer(clock, GRACE_S / 2), GRACE_S)
    assert clock.now <= GRACE_S
    grace.renew(is_idle=False)
    assert grace.wait(Answer(clock, GRACE_S / 2), GRACE_S) is not None


def test_a_store_that_let_one_wait_run_out_gets_none_until_it_answers(clock: Clock, grace: Grace) -> None:
    slow = Answer(clock)
    for _ in range(10):
        assert grace.wait(slow, GRACE_S) is None
        grace.renew(is_idle=False)
    assert clock.now == GRACE_S
    slow.set_result(Acquired(id=1, pages=[], waiting=False))
    assert grace.wait(slow, GRACE_S) is not None
    grace.renew(is_idle=False)
    assert grace.wait(Answer(clock, GRACE_S / 2), GRACE_S) is not None


def test_a_look_without_a_wait_says_nothing_about_the_store(clock: Clock, grace: Grace) -> None:
    assert grace.wait(Answer(clock), 0.0) is None
    assert grace.wait(Answer(clock, GRACE_S / 2), GRACE_S) is not None


def test_what_others_left_of_a_step_is_too_short_to_tell_of_the_store(clock: Clock, grace: Grace) -> None:
    assert grace.wait(Answer(clock, GRACE_S * 0.9), GRACE_S) is not None
    assert grace.wait(Answer(clock), GRACE_S) is None
    grace.renew(is_idle=False)
    assert grace.wait(Answer(clock, GRACE_S * 0.9), GRACE_S) is not None


def test_an_idle_engine_waits_for_a_silent_store_in_each_step(clock: Clock, grace: Grace) -> None:
    slow = Answer(clock, 4.5 * GRACE_S)
    answers = []
    for _ in range(5):
        answers.append(grace.wait(slow, GRACE_S))
        grace.renew(is_idle=True)
    assert [answer is None for answer in answers] == [True] * 4 + [False]
    assert clock.now == pytest.approx(4.5 * GRACE_S)
    grace.renew(is_idle=False)
    assert grace.wait(Answer(clock, GRACE_S / 2), GRACE_S) is not None, "it answered: it is silent no more"


class SilentClient(FakeClient):
    """A store that does not answer, and how long it was waited for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def acquire(self, *arguments: object, **options: object) -> Future[Acquired]:
        return Answer(self.clock)


def test_fifty_waiting_requests_cost_a_step_no_more_than_one() -> None:
    clock = Clock()
    engine = Engine(client=SilentClient(clock), clock=clock)
    requests = [engine.arrive(prompt(64, f"r{number}")) for number in range(50)]
    for _ in range(10):
        for request in requests:
            assert engine.half.matched_tokens(request, 0) is None
        engine.half.build_plan([])
        clock.now += 0.05
    assert clock.now <= 10 * 0.05 + GRACE_S * 1.001


@pytest.mark.parametrize(("is_idle", "waits"), [(True, 10), (False, 1)])
def test_looks_at_short_intervals_wait_for_the_store_while_nothing_is_computed(is_idle: bool, waits: int) -> None:
    """Else the engine's thread would take the interpreter from the thread that keeps the link, until it gives up."""
    clock = Clock()
    engine = Engine(client=SilentClient(clock), clock=clock)
    request = engine.arrive(prompt(64, "r"))
    for _ in range(10):
        assert engine.half.matched_tokens(request, 0) is None
        engine.half.build_plan([], is_idle=is_idle)
        clock.now += 0.001
    assert clock.now == pytest.approx(10 * 0.001 + waits * GRACE_S)
