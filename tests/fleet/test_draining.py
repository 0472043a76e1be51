"""Draining a worker: no new work, and an exact count of what is left."""

from __future__ import annotations

import pytest

from kvrelay.errors import Overloaded, Refused
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask
from kvrelay.policy.breaker import FAILURES_TO_OPEN, State
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Drain, RequestFacts, Role, Stage
from tests.fleet.values import begun, store, worker


def ask(name: str) -> Ask:
    facts = RequestFacts(request_id=name, model="tiny", prompt_tokens=(200,), max_tokens=10, page_names=())
    return Ask(facts=facts, received_s=0.0)


@pytest.fixture
def brain() -> Brain:
    """Two prefill and two decode workers, on a store each side."""
    brain = Brain(dead_after_s=2.0, transfer_wait_s=9.0, local_prefill=False)
    for name in ("sp", "sd"):
        brain.members.register_store(store(name), 0.0)
    for number in (1, 2):
        brain.register_worker(worker(f"p{number}", Role.PREFILL, store="sp"), 0.0)
        brain.register_worker(worker(f"d{number}", Role.DECODE, store="sd"), 0.0)
    return brain


def left(brain: Brain, name: str) -> tuple[int, int, int]:
    remaining = brain.drains.remaining(name, 0.0)
    return remaining.prompts, remaining.answers, remaining.transfers


def test_a_draining_worker_gets_no_new_work_and_keeps_what_it_has(brain: Brain) -> None:
    first = begun(brain, ask("r0")).prefills[0].worker
    brain.drains.begin(first, 0.0)
    assert {begun(brain, ask(f"r{number}")).prefills[0].worker for number in range(1, 5)} == {"p1", "p2"} - {first}
    assert left(brain, first) == (1, 0, 0)
    assert brain.drains.remaining(first, 0.0).draining


def test_a_prefill_worker_is_empty_once_its_pages_are_where_they_are_needed(brain: Brain) -> None:
    order = begun(brain, ask("r0")).prefills[0]
    brain.drains.begin(order.worker, 0.0)
    brain.prefill_finished("r0", 0, 0, 1.0)
    assert left(brain, order.worker) == (0, 0, 1)
    brain.transfer_event(TransferEvent(store="sd", transfer=order.transfer, stage=Stage.ARRIVED), 1.1)
    assert brain.drains.remaining(order.worker, 1.1).is_empty


@pytest.mark.parametrize("stage", [Stage.FAILED, Stage.LOADED])
def test_nobody_waits_for_pages_that_will_not_come_or_are_needed_no_more(brain: Brain, stage: Stage) -> None:
    order = begun(brain, ask("r0")).prefills[0]
    brain.prefill_finished("r0", 0, 0, 1.0)
    brain.transfer_event(TransferEvent(store="sd", transfer=order.transfer, stage=stage), 1.1)
    assert left(brain, order.worker) == (0, 0, 0)


def test_a_decode_worker_is_empty_once_its_answers_are_written(brain: Brain) -> None:
    begun(brain, ask("r0"))
    name = brain.decode_order("r0", 0.0).worker
    brain.drains.begin(name, 0.0)
    assert left(brain, name) == (0, 1, 0)
    brain.finish("r0", status=200, output_tokens=3, now=1.0)
    assert brain.drains.remaining(name, 1.0).is_empty


def test_an_undone_drain_lets_work_in_again(brain: Brain) -> None:
    brain.drains.begin("p1", 0.0)
    brain.drains.undo("p1")
    assert {begun(brain, ask(f"r{number}")).prefills[0].worker for number in range(4)} == {"p1", "p2"}


def test_a_worker_that_is_started_anew_gets_work_and_one_that_dials_again_does_not(brain: Brain) -> None:
    brain.drains.begin("p1", 0.0)
    brain.register_worker(worker("p1", Role.PREFILL, store="sp"), 0.1)
    assert brain.drains.remaining("p1", 0.1).draining
    brain.register_worker(worker("p1", Role.PREFILL, store="sp", incarnation="i2"), 0.2)
    assert not brain.drains.remaining("p1", 0.2).draining


def test_what_a_worker_was_told_counts_for_a_router_that_is_started_again(brain: Brain) -> None:
    brain.drains.heard(worker("p1", Role.PREFILL, store="sp"), Drain(number=3, draining=True))
    assert brain.drains.remaining("p1", 0.0).draining
    assert brain.drains.untold(worker("p1", Role.PREFILL, store="sp")) is None
    brain.drains.undo("p1")
    assert brain.drains.untold(worker("p1", Role.PREFILL, store="sp")) == Drain(number=4)


def test_what_a_worker_says_does_not_undo_an_order_that_has_yet_to_reach_it(brain: Brain) -> None:
    told = worker("p1", Role.PREFILL, store="sp")
    brain.drains.begin("p1", 0.0)
    brain.drains.heard(told, Drain())
    assert brain.drains.remaining("p1", 0.0).draining
    order = brain.drains.untold(told)
    assert order == Drain(number=1, draining=True)
    brain.drains.heard(told, order)
    assert brain.drains.untold(told) is None


def test_of_two_routers_that_say_different_things_at_a_time_the_one_that_was_first_is_obeyed(brain: Brain) -> None:
    told = worker("p1", Role.PREFILL, store="sp")
    brain.drains.heard(told, Drain(number=1, draining=True))
    brain.drains.undo("p1")
    brain.drains.heard(told, Drain(number=2, draining=True))
    assert brain.drains.remaining("p1", 0.0).draining
    assert brain.drains.untold(told) is None


def test_a_former_life_of_a_worker_says_nothing_of_this_one(brain: Brain) -> None:
    former = worker("p1", Role.PREFILL, store="sp", incarnation="i0")
    brain.drains.heard(former, Drain(number=9, draining=True))
    assert not brain.drains.remaining("p1", 0.0).draining
    assert brain.drains.untold(former) is None


def test_the_order_to_drain_a_worker_that_drains_is_none(brain: Brain) -> None:
    brain.drains.begin("d1", 0.0)
    brain.drains.begin("d2", 0.0, force=True)
    brain.drains.begin("d1", 0.0)
    assert brain.drains.untold(worker("d1", Role.DECODE, store="sd")) == Drain(number=1, draining=True)


def test_the_last_worker_that_writes_answers_is_drained_by_force_alone(brain: Brain) -> None:
    brain.drains.begin("d1", 0.0)
    with pytest.raises(Refused, match="start another one first, or add --force: then clients get 503 until"):
        brain.drains.begin("d2", 0.0)
    begun(brain, ask("r0"))
    brain.drains.begin("d2", 0.0, force=True)
    with pytest.raises(Overloaded):
        brain.begin(ask("r1"), 0.0)


@pytest.mark.parametrize("state", [State.OPEN, State.PROBING])
def test_a_worker_that_fails_is_no_other_and_the_refusal_names_it(brain: Brain, state: State) -> None:
    breakers = brain.outcomes.breakers
    for _ in range(FAILURES_TO_OPEN - 1):
        breakers.failed("d2", "x", 0.0)
    brain.drains.begin("d1", 0.0)
    brain.drains.undo("d1")
    breakers.failed("d2", "x", 0.0)
    if state is State.PROBING:
        breakers.sent("d2", "r")
    with pytest.raises(Refused, match=rf"d1 is the last .* \(d2 fails, its circuit breaker is {state}\): .* --force"):
        brain.drains.begin("d1", 0.0)
    assert not brain.drains.remaining("d1", 0.0).draining
    brain.drains.begin("d1", 0.0, force=True)
    brain.drains.undo("d1")
    breakers.succeeded("d2", "y", 1.0)
    brain.drains.begin("d1", 0.0)


def test_streams_stay_at_a_draining_worker_while_all_others_fail(brain: Brain) -> None:
    begun(brain, ask("r0"))
    name = brain.decode_order("r0", 0.0).worker
    brain.drains.begin(name, 0.0)
    other = {"d1": "d2", "d2": "d1"}[name]
    for _ in range(FAILURES_TO_OPEN):
        brain.outcomes.breakers.failed(other, "x", 0.0)
    assert brain.drains.hand_over(name, 0.0) == []
    brain.outcomes.breakers.succeeded(other, "y", 1.0)
    assert len(brain.drains.hand_over(name, 0.0)) == 1


@pytest.mark.parametrize(("now", "why"), [(0.0, "d2 is not healthy"), (3.0, "d2 is away")])
def test_the_refusal_says_why_each_other_worker_does_not_count(brain: Brain, now: float, why: str) -> None:
    heard = {"counts": {}, "healthy": True, "now": now}
    brain.fleet.workers.hear("d2", "i1", **{**heard, "healthy": False, "now": 0.0})  # type: ignore[arg-type]
    brain.fleet.workers.hear("d1", "i1", **heard)  # type: ignore[arg-type]
    with pytest.raises(Refused, match=why):
        brain.drains.begin("d1", now)


def test_all_prefill_workers_may_be_drained_since_decode_workers_compute_prompts_too(brain: Brain) -> None:
    for name in ("p1", "p2"):
        brain.drains.begin(name, 0.0)
    assert begun(brain, ask("r0")).local_reason == "no_prefill"


def test_a_worker_that_is_away_is_waited_for_no_more(brain: Brain) -> None:
    begun(brain, ask("r0"))
    assert not brain.drains.remaining("d1", 2.0).gone
    assert brain.drains.remaining("d1", 2.1).is_empty


def test_nobody_is_drained_who_is_not_known(brain: Brain) -> None:
    with pytest.raises(Refused, match="knows d1, d2, p1, p2"):
        brain.drains.begin("x", 0.0)
    with pytest.raises(Refused, match="no worker is called 'x'"):
        brain.drains.undo("x")


def test_only_answers_that_can_go_on_elsewhere_leave_a_draining_worker(brain: Brain) -> None:
    begun(brain, ask("r0"))
    name = brain.decode_order("r0", 0.0).worker
    assert brain.drains.hand_over(name, 0.0) == [], "it is not draining"
    brain.drains.begin(name, 0.0)
    (command,) = brain.drains.hand_over(name, 0.0)
    assert (command.request_id, command.reason, command.if_resumable) == ("r0", "drained", True)
    other = {"d1": "d2", "d2": "d1"}[name]
    brain.drains.begin(other, 0.0, force=True)
    assert brain.drains.hand_over(name, 0.0) == [], "nobody could write on"
