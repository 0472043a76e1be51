"""Workers of one model that take prompts and answers of unlike lengths: nobody is sent what it would refuse."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrelay.errors import Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import DispatchDecode, Plan, Queued, SendPrefill, Start
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Manner
from kvrelay.policy.route import Path
from kvrelay.types import Role
from tests.fleet.beats import rest
from tests.fleet.known import ask as plain_ask
from tests.fleet.known import known_brain, member
from tests.fleet.values import begun

SHORT, LONG = 4096, 8192


def fleet(*lengths: tuple[str, int], local_prefill: bool = True) -> Brain:
    """Workers by name, the first letter of which is their role, and what they take."""
    brain = known_brain([("p", "s1")], [])
    known = brain.fleet.workers.get("p")
    assert known is not None
    brain.leaving(known.info, 0.0)
    brain._chooser._local_prefill = local_prefill
    for name, tokens in lengths:
        register(brain, name, tokens, 0.0)
    return brain


def register(
    brain: Brain, name: str, tokens: int, now: float, *, incarnation: str = "i1", replays: bool = False
) -> None:
    """A worker is ready."""
    info = member(name, Role.PREFILL if name.startswith("p") else Role.DECODE)
    engine = replace(info.engine, max_model_len=tokens, replays=replays)
    brain.register_worker(replace(info, incarnation=incarnation, engine=engine), now)


def begin(brain: Brain, name: str, tokens: int, demanded: int = 0) -> Plan:
    """A prompt of ``tokens`` that is like no other, and an answer with which it has ``demanded`` tokens."""
    asked = plain_ask(name, (int(name[1:]), tokens))
    plan = begun(brain, replace(asked, context_tokens=max(demanded, tokens + 1)))
    for _ in plan.prefills:
        brain.prefill_sent(name, 0.0)
    return plan


@pytest.mark.parametrize(("tokens", "workers"), [(5000, {"p1"}), (SHORT, {"p1"}), (SHORT - 1, {"p0", "p1"})])
def test_a_prompt_goes_to_prefill_workers_that_take_it_and_a_token_alone(tokens: int, workers: set[str]) -> None:
    brain = fleet(("p0", SHORT), ("p1", LONG), ("d0", LONG), local_prefill=False)
    assert {begin(brain, f"r{number}", tokens).prefills[0].worker for number in range(4)} == workers
    brain.check_invariants()


def test_an_answer_is_written_where_all_of_it_has_room() -> None:
    brain = fleet(("p0", LONG), ("d0", SHORT), ("d1", LONG))
    for number in range(4):
        begin(brain, f"r{number}", 3000, demanded=6000)
        assert brain.decode_order(f"r{number}", 0.0).worker == "d1"
    for number in range(4):
        brain.finish(f"r{number}", status=200, output_tokens=1, now=0.0)
    for number in range(4, 8):
        begin(brain, f"r{number}", 3000)
    assert {brain.decode_order(f"r{number}", 0.0).worker for number in range(4, 8)} == {"d0", "d1"}


@pytest.mark.parametrize("local_prefill", [False, True])
def test_what_is_too_long_for_every_prefill_worker_is_computed_where_it_is_answered(local_prefill: bool) -> None:
    brain = fleet(("p0", SHORT), ("d0", LONG), local_prefill=local_prefill)
    plan = begin(brain, "r0", 5000)
    assert (plan.path, plan.local_reason) == (Path.LOCAL, "long_prompt")


def test_no_other_worker_is_asked_that_would_refuse() -> None:
    brain = fleet(("p0", SHORT), ("p1", LONG), ("p2", LONG), ("d0", SHORT), ("d1", LONG), ("d2", LONG))
    first = begin(brain, "r0", 5000).prefills[0].worker
    (again,) = brain.prefill_failed("r0", 0, 0.1)
    assert isinstance(again, SendPrefill)
    assert {first, again.order.worker} == {"p1", "p2"}
    assert brain.prefill_failed("r0", 0, 0.2) == [DispatchDecode(request_id="r0")]
    asked = {brain.decode_order("r0", 0.2).worker}
    assert brain.decode_refused("r0", 0.3)
    assert {*asked, brain.decode_order("r0", 0.3).worker} == {"d1", "d2"}
    assert brain.decode_refused("r0", 0.4) is None


def test_an_answer_goes_on_only_where_the_rest_of_it_has_room() -> None:
    brain = fleet(("d0", LONG), ("d1", SHORT), ("d2", LONG))
    begin(brain, "r0", 3000, demanded=6000)
    lost = brain.decode_order("r0", 0.0).worker
    brain.first_token("r0", 0.1)
    left = rest()
    assert left.ask is not None
    left = replace(left, ask=replace(left.ask, context_tokens=6000))
    assert isinstance(brain.recovery.lost("r0", left, reason=LossReason.RESET, now=1.0), Plan)
    assert brain.decode_order("r0", 1.0).worker == {"d0": "d2", "d2": "d0"}[lost]


def test_what_nobody_takes_now_may_come_again() -> None:
    brain = fleet(("p0", LONG), ("d0", SHORT))
    with pytest.raises(Overloaded):
        begin(brain, "r0", 5000)
    brain.check_invariants()


def cut_off(brain: Brain, name: str) -> None:
    """Its link ends; it may be starting again."""
    known = brain.fleet.workers.get(name)
    assert known is not None
    brain.members.link(known.info, 1)
    brain.members.link(known.info, -1)


@pytest.mark.parametrize("others", [(), (("d1", SHORT),)], ids=["alone", "beside a short one"])
def test_a_long_answer_waits_for_the_worker_that_takes_it_whoever_else_is_there(others: tuple[tuple[str, int]]) -> None:
    brain = fleet(("d0", LONG), *others)
    begin(brain, "r0", 3000, demanded=6000)
    brain.decode_order("r0", 0.0)
    brain.first_token("r0", 0.1)
    cut_off(brain, "d0")
    left = rest()
    assert left.ask is not None
    left = replace(left, ask=replace(left.ask, context_tokens=6000))
    assert isinstance(brain.recovery.lost("r0", left, reason=LossReason.RESET, now=1.0), Queued)
    assert list(brain.recovery.turn(1.5)) == []
    register(brain, "d0", LONG, 2.0, incarnation="i2")
    assert [type(command) for command in brain.recovery.turn(2.0)] == [Start]


def test_a_long_request_that_nothing_was_written_of_waits_for_the_worker_that_takes_it() -> None:
    brain = fleet(("d0", LONG), ("d1", SHORT))
    begin(brain, "r0", 3000, demanded=6000)
    brain.decode_order("r0", 0.0)
    cut_off(brain, "d0")
    assert isinstance(brain.decode_refused("r0", 1.0, reason=LossReason.RESET), Queued)
    register(brain, "d0", LONG, 2.0, incarnation="i2")
    assert list(brain.recovery.turn(2.0)) == [DispatchDecode(request_id="r0")]


def test_an_answer_that_is_replayed_waits_for_a_worker_that_can() -> None:
    brain = fleet()
    register(brain, "d0", LONG, 0.0, replays=True)
    begin(brain, "r0", 3000)
    brain.decode_order("r0", 0.0)
    brain.first_token("r0", 0.1)
    register(brain, "d1", LONG, 0.2)
    cut_off(brain, "d0")
    left = rest(manner=Manner.REPLAY, replay_tokens=4)
    assert isinstance(brain.recovery.lost("r0", left, reason=LossReason.RESET, now=1.0), Queued)
