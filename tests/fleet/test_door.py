"""Requests that wait, come in and are refused, through the brain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.errors import Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, Plan, Refuse, Start, Waits
from kvrelay.policy.admit import Limits, Slo
from kvrelay.types import RequestFacts, Role
from tests.fleet.values import store, worker


def fleet(limits: Limits, *, kv_tokens: int = 4096, prefill: int = 1) -> Brain:
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, limits=limits)
    brain.members.register_store(store(), 0.0)
    for number in range(prefill):
        brain.register_worker(worker(f"p{number}", Role.PREFILL), 0.0)
    brain.register_worker(worker("d", Role.DECODE, kv_tokens=kv_tokens), 0.0)
    return brain


def ask(name: str, tokens: int = 100, *, tenant: str = "", now: float = 0.0, **slo: Any) -> Ask:
    facts = RequestFacts(request_id=name, model="tiny", prompt_tokens=(tokens,), max_tokens=20, page_names=())
    return Ask(facts=facts, tenant=tenant, received_s=now, slo=Slo(**slo))


def end(brain: Brain, name: str, now: float) -> list[str]:
    """``name`` is over; who comes in for it."""
    brain.finish(name, status=200, output_tokens=1, now=now)
    return [command.request_id for command in brain.admit_waiting(now) if isinstance(command, Start)]


HOLDS = Limits(queue_s=0.0, hold_s=10.0)


def test_kv_of_d_is_promised_before_p_begins_and_who_finds_none_waits() -> None:
    brain = fleet(Limits(queue_s=1e9, hold_s=10.0), kv_tokens=300)
    assert isinstance(brain.begin(ask("a"), 0.0), Plan)
    assert isinstance(brain.begin(ask("b"), 0.0), Plan)
    assert brain.begin(ask("c"), 0.0) == Waits(request_id="c")
    assert (brain.loads.kv_tokens["d"], brain.loads.prefill_legs["p0"], brain.in_flight) == (240, 2, 3)
    assert end(brain, "a", 1.0) == ["c"]
    brain.check_invariants()


def test_a_request_larger_than_all_of_d_gets_in_when_nobody_else_is_there() -> None:
    brain = fleet(HOLDS, kv_tokens=100)
    assert isinstance(brain.begin(ask("a"), 0.0), Plan)
    assert isinstance(brain.begin(ask("b"), 0.0), Waits)
    assert end(brain, "a", 1.0) == ["b"]


def test_a_p_has_one_prompt_to_compute_and_one_to_follow_and_the_others_wait() -> None:
    brain = fleet(HOLDS)
    kinds = [type(brain.begin(ask(f"r{number}"), 0.0)) for number in range(4)]
    assert kinds == [Plan, Plan, Waits, Waits]
    (start,) = brain.prefill_finished("r0", 0, 0, 0.5)[1:]
    assert isinstance(start, Start)
    assert start.request_id == "r2"
    brain.check_invariants()


@pytest.mark.parametrize(("shared_chunk_tokens", "kind"), [(0, Waits), (16, Plan)])
def test_a_short_prompt_does_not_wait_for_long_ones_where_it_may_overtake_them(
    shared_chunk_tokens: int, kind: type[Plan] | type[Waits]
) -> None:
    brain = fleet(Limits(queue_s=1.0, hold_s=10.0), kv_tokens=100_000)
    sharing = worker("p0", Role.PREFILL)
    engine = msgspec.structs.replace(sharing.engine, shared_chunk_tokens=shared_chunk_tokens)
    brain.register_worker(msgspec.structs.replace(sharing, engine=engine), 0.0)
    for tokens in (1000, 5) * 20:
        brain.experience.saw("p0", lambda perf, tokens=tokens: perf.saw_prefill(tokens, 0, 0.005 * tokens))  # type: ignore[misc]
    for number in range(3):
        brain.begin(ask(f"long {number}", 1000), 0.0)
    assert isinstance(brain.begin(ask("short", 5), 0.0), kind)


@pytest.mark.parametrize("writer", [True, False], ids=["full", "without a writer"])
def test_a_model_that_cannot_be_served_holds_no_other_up(writer: bool) -> None:
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, limits=HOLDS, local_prefill=False)
    brain.members.register_store(store(), 0.0)
    for model in "AB":
        for name, role in ((f"p{model}", Role.PREFILL), (f"d{model}", Role.DECODE)):
            brain.register_worker(msgspec.structs.replace(worker(name, role), model=model), 0.0)
    kinds: dict[str, list[type[Plan | Waits]]] = {}
    for model in "AB":
        for number in range(3):
            asked = ask(f"{model}{number}")
            facts = msgspec.structs.replace(asked.facts, model=model)
            kinds.setdefault(model, []).append(type(brain.begin(msgspec.structs.replace(asked, facts=facts), 0.0)))
    assert kinds == {"A": [Plan, Plan, Waits], "B": [Plan, Plan, Waits]}
    if not writer:
        brain.leaving(msgspec.structs.replace(worker("dA", Role.DECODE), model="A"), 0.0)
    started = [command for command in brain.prefill_finished("B0", 0, 0, 0.5) if isinstance(command, Start)]
    assert [start.request_id for start in started] == ["B2"]
    assert len(brain.door.waiting) == 1
    brain.check_invariants()


def test_tenants_that_wait_take_turns() -> None:
    brain = fleet(HOLDS)
    for number in range(6):
        brain.begin(ask(f"many {number}", tenant="many"), 0.0)
    brain.begin(ask("one", tenant="one"), 0.0)
    assert "one" in [*end(brain, "many 0", 1.0), *end(brain, "many 1", 2.0)]


def known(limits: Limits, *, roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE), s_per_token: float = 0.1) -> Brain:
    """Its workers are measured, so their predictions may refuse somebody."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, limits=limits)
    brain.members.register_store(store(), 0.0)
    for number, role in enumerate(roles):
        brain.register_worker(worker(f"{role.value}-{number}", role, kv_tokens=100_000), 0.0)
        for tokens in (50, 100, 200) * 10:
            learn(brain, f"{role.value}-{number}", tokens, s_per_token * tokens)
    return brain


def learn(brain: Brain, name: str, tokens: int, seconds: float) -> None:
    brain.experience.saw(name, lambda perf: perf.saw_prefill(tokens, 0, seconds))


def fill(brain: Brain, **more: Any) -> int:
    """One tenant sends until it is refused; how many get in or wait."""
    for number in range(100):
        try:
            brain.begin(ask(f"many {number}", tenant="many", **more), 0.0)
        except Overloaded:
            return number
    return 100


def test_a_tenant_whose_turn_is_next_is_not_refused_for_what_another_one_has_waiting() -> None:
    brain = known(Limits(queue_s=0.0, hold_s=60.0))
    assert 6 <= fill(brain) <= 10, "ten seconds each"
    assert isinstance(brain.begin(ask("one", tenant="one"), 0.0), Waits)
    with pytest.raises(Overloaded, match="wait before this request"):
        brain.begin(ask("many again", tenant="many"), 0.0)
    assert "one" in [*end(brain, "many 0", 1.0), *end(brain, "many 1", 2.0)]


def test_nor_is_its_promise_taken_for_broken() -> None:
    brain = known(Limits(queue_s=0.0, hold_s=60.0))
    fill(brain)
    assert isinstance(brain.begin(ask("one", tenant="one", ttft_s=50.0), 0.0), Waits)


def test_what_waits_is_shared_by_the_decode_workers_where_no_other_ones_are_left() -> None:
    alone, four = (known(Limits(queue_s=0.0, hold_s=60.0), roles=(Role.DECODE,) * count) for count in (1, 4))
    waiting = [fill(brain) - 2 * count for brain, count in ((alone, 1), (four, 4))]
    assert waiting[1] == pytest.approx(4 * waiting[0], abs=4)


def test_a_tenant_leaves_places_for_others() -> None:
    brain = fleet(Limits(queue_s=0.0, hold_s=60.0, in_flight=90))
    assert fill(brain) == 80
    assert brain.door.refused == {"tenant": 1}
    assert isinstance(brain.begin(ask("one", tenant="one"), 0.0), Waits)
    brain.finish("many 0", status=499, output_tokens=0, now=1.0)
    brain.finish("one", status=499, output_tokens=0, now=1.0)
    assert isinstance(brain.begin(ask("many again", tenant="many"), 1.0), Waits)
    brain.check_invariants()


def test_who_waited_too_long_is_refused_once_and_leaves_nothing() -> None:
    brain = fleet(HOLDS)
    for name in ("a", "b", "c"):
        brain.begin(ask(name), 0.0)
    assert brain.tick(10.0) == []
    (refusal,) = brain.tick(10.1)
    assert isinstance(refusal, Refuse)
    assert (refusal.request_id, brain.door.refused["deadline"], brain.in_flight) == ("c", 1, 3)
    assert brain.tick(10.2) == []
    timeline = brain.finish("c", status=503, output_tokens=0, now=10.2)
    assert (timeline.status, timeline.path, brain.in_flight) == (503, "none", 2)
    brain.check_invariants()


def test_a_client_that_goes_away_while_it_waits_is_forgotten() -> None:
    brain = fleet(HOLDS)
    for name in ("a", "b", "c"):
        brain.begin(ask(name), 0.0)
    brain.finish("c", status=499, output_tokens=0, now=1.0)
    assert end(brain, "a", 2.0) == []


def test_a_promise_that_would_be_broken_is_refused_only_by_measured_workers() -> None:
    brain = fleet(Limits())
    brain.begin(ask("busy", 4000), 0.0)
    assert isinstance(brain.begin(ask("early", ttft_s=1e-6), 0.0), Plan)
    for number in range(10):
        name, now = f"r{number}", 100.0 * (number + 1)
        brain.begin(ask(name, now=now), now)
        brain.prefill_finished(name, 0, 0, now + 2.0)
        brain.finish(name, status=499, output_tokens=0, now=now + 2.0)
        if number == 0:
            brain.finish("busy", status=499, output_tokens=0, now=now)
            brain.finish("early", status=499, output_tokens=0, now=now)
    now = 5000.0
    assert isinstance(brain.begin(ask("alone", now=now, ttft_s=0.5), now), Plan)
    with pytest.raises(Overloaded, match="first token is predicted") as refused:
        brain.begin(ask("late", now=now, ttft_s=0.5), now)
    assert refused.value.after_s >= 1.0
    assert brain.door.refused == {"ttft": 1}
    assert isinstance(brain.begin(ask("patient", now=now, ttft_s=60.0), now), Plan)
