"""Requests that wait, come in and are refused, through the brain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.errors import Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, Command, DispatchDecode, Plan, Queued, Refuse, Start
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
    assert brain.begin(ask("c"), 0.0) == Queued(request_id="c")
    assert (brain.loads.kv_tokens["d"], brain.loads.prefill_legs["p0"], brain.in_flight) == (240, 2, 3)
    assert end(brain, "a", 1.0) == ["c"]
    brain.check_invariants()


def test_a_request_larger_than_all_of_d_gets_in_when_nobody_else_is_there() -> None:
    brain = fleet(HOLDS, kv_tokens=100)
    assert isinstance(brain.begin(ask("a"), 0.0), Plan)
    assert isinstance(brain.begin(ask("b"), 0.0), Queued)
    assert end(brain, "a", 1.0) == ["b"]


def test_who_waits_for_a_worker_that_left_is_turned_away_and_keeps_nobody_waiting() -> None:
    brain = fleet(HOLDS, kv_tokens=150)
    long, short = worker("long", Role.DECODE, kv_tokens=150), worker("short", Role.DECODE, max_model_len=200)
    brain.register_worker(long, 0.0)
    for name in "ab":  # those two that take so much are full
        assert isinstance(brain.begin(msgspec.structs.replace(ask(name), context_tokens=1000), 0.0), Plan)
    assert isinstance(brain.begin(msgspec.structs.replace(ask("c"), context_tokens=1000), 0.0), Queued)
    assert isinstance(brain.begin(ask("d"), 0.0), Queued)
    for name in "ab":
        assert not [each for each in brain.prefill_finished(name, 0, 0, 0.5) if isinstance(each, Start)]
    brain.register_worker(short, 1.0)
    for gone in ("d", "long"):
        member = brain.fleet.workers.get(gone)
        assert member is not None
        brain.leaving(member.info, 1.0)
    commands = brain.admit_waiting(1.0)
    assert [(type(each), each.request_id) for each in commands] == [(Refuse, "c")]
    brain.finish("c", status=503, output_tokens=0, now=1.0)
    assert [(type(each), each.request_id) for each in brain.admit_waiting(1.0)] == [(Start, "d")]
    brain.check_invariants()


def unlike_lengths() -> Brain:
    """The worker that takes long prompts is full, and a long request waits for it; one for short ones is idle."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, limits=Limits(queue_s=1e9, hold_s=30.0))
    brain.members.register_store(store(), 0.0)
    brain.register_worker(worker("p0", Role.PREFILL), 0.0)
    brain.register_worker(worker("long", Role.DECODE, kv_tokens=1000), 0.0)
    brain.register_worker(worker("short", Role.DECODE, kv_tokens=1000, max_model_len=200), 0.0)
    assert isinstance(brain.begin(long_ask("l0"), 0.0), Plan)
    assert isinstance(brain.begin(long_ask("l1"), 0.1), Queued)
    return brain


def long_ask(name: str) -> Ask:
    return msgspec.structs.replace(ask(name, tokens=700), context_tokens=701)


def short_ask(name: str, **more: Any) -> Ask:
    return msgspec.structs.replace(ask(name, tokens=100, **more), context_tokens=101)


def test_a_short_request_is_not_behind_a_long_one_that_waits_for_a_worker_of_its_own() -> None:
    brain = unlike_lengths()
    assert isinstance(brain.begin(short_ask("s0"), 0.2), Plan)
    assert brain.decode_order("s0", 0.2).worker == "short"
    brain.check_invariants()


def test_short_requests_that_wait_come_in_beside_a_long_one_and_take_nothing_that_it_waits_for() -> None:
    brain = unlike_lengths()
    begun = [f"s{number}" for number in range(20) if isinstance(brain.begin(short_ask(f"s{number}"), 0.2), Plan)]
    assert 0 < len(begun) < 18
    assert brain.admit_waiting(1.0) == []
    assert end(brain, begun[0], 1.0) == [f"s{len(begun)}"]
    assert {brain.decode_order(name, 1.0).worker for name in (*begun[1:], f"s{len(begun)}")} == {"short"}
    assert "l1" in end(brain, "l0", 2.0)
    brain.check_invariants()


def three_lengths() -> Brain:
    """A long request waits for the worker that takes it; the short worker is full, and the one between is idle."""
    brain = unlike_lengths()
    while isinstance(brain.begin(short_ask(f"s{brain.in_flight}"), 0.2), Plan):
        pass
    end(brain, f"s{brain.in_flight - 1}", 0.3)  # it waited
    brain.register_worker(worker("middle", Role.DECODE, kv_tokens=1000, max_model_len=400), 0.3)
    return brain


def middle_ask(name: str, **more: Any) -> Ask:
    return msgspec.structs.replace(ask(name, tokens=300, **more), context_tokens=301)


@pytest.mark.parametrize("promise", [{}, {"ttft_s": 1.0}], ids=["none", "within a second"])
def test_a_short_request_is_served_by_any_worker_that_is_too_short_for_those_that_wait(
    promise: dict[str, float],
) -> None:
    brain = three_lengths()
    assert isinstance(brain.begin(short_ask("s", **promise), 0.4), Plan)
    assert brain.decode_order("s", 0.4).worker == "middle"
    brain.check_invariants()


def test_a_request_passes_those_of_two_lengths_that_wait_for_kv() -> None:
    brain = three_lengths()
    begun = [f"m{number}" for number in range(9) if isinstance(brain.begin(middle_ask(f"m{number}"), 0.4), Plan)]
    assert 0 < len(begun) < 9, "some of them wait for the worker between"
    end(brain, "s2", 0.5)
    assert isinstance(brain.begin(short_ask("s"), 0.6), Plan)
    assert brain.decode_order("s", 0.6).worker == "short"
    brain.check_invariants()


def test_a_request_does_not_pass_one_that_could_have_its_worker() -> None:
    brain = three_lengths()
    while isinstance(brain.begin(short_ask(f"t{brain.in_flight}"), 0.4), Plan):
        pass
    assert isinstance(brain.begin(short_ask("late"), 0.5), Queued)
    brain.check_invariants()


def test_short_requests_beside_a_long_one_are_fair_between_their_tenants() -> None:
    brain = unlike_lengths()
    begun = [f"s{number}" for number in range(8) if isinstance(brain.begin(short_ask(f"s{number}"), 0.2), Plan)]
    for tenant in "aab":
        assert isinstance(brain.begin(short_ask(f"{tenant}{brain.in_flight}", tenant=tenant), 0.3), Queued)
    started = [name for number in range(3) for name in end(brain, begun[number], 1.0 + number)]
    tenants = [name[0] for name in started if name[0] in "ab"]
    assert tenants[:2] == ["a", "b"]


def test_a_p_has_one_prompt_to_compute_and_one_to_follow_and_the_others_wait() -> None:
    brain = fleet(HOLDS)
    kinds = [type(brain.begin(ask(f"r{number}"), 0.0)) for number in range(4)]
    assert kinds == [Plan, Plan, Queued, Queued]
    (start,) = brain.prefill_finished("r0", 0, 0, 0.5)[1:]
    assert isinstance(start, Start)
    assert start.request_id == "r2"
    brain.check_invariants()


@pytest.mark.parametrize(("shared_chunk_tokens", "kind"), [(0, Queued), (16, Plan)])
def test_a_short_prompt_does_not_wait_for_long_ones_where_it_may_overtake_them(
    shared_chunk_tokens: int, kind: type[Plan] | type[Queued]
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
    kinds: dict[str, list[type[Plan | Queued]]] = {}
    for model in "AB":
        for number in range(3):
            asked = ask(f"{model}{number}")
            facts = msgspec.structs.replace(asked.facts, model=model)
            kinds.setdefault(model, []).append(type(brain.begin(msgspec.structs.replace(asked, facts=facts), 0.0)))
    assert kinds == {"A": [Plan, Plan, Queued], "B": [Plan, Plan, Queued]}
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


def known(
    limits: Limits,
    *,
    roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE),
    kv_tokens: int = 100_000,
    shared_chunk_tokens: int = 0,
) -> Brain:
    """Its workers are measured, at a tenth of a second a token, so their predictions may refuse somebody."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, limits=limits)
    brain.members.register_store(store(), 0.0)
    for number, role in enumerate(roles):
        made = worker(f"{role.value}-{number}", role, kv_tokens=kv_tokens)
        engine = msgspec.structs.replace(made.engine, shared_chunk_tokens=shared_chunk_tokens)
        brain.register_worker(msgspec.structs.replace(made, engine=engine), 0.0)
        for tokens in (50, 100, 200) * 10:
            learn(brain, made.name, tokens, 0.1 * tokens)
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
    assert isinstance(brain.begin(ask("one", tenant="one"), 0.0), Queued)
    with pytest.raises(Overloaded, match="wait before this request"):
        brain.begin(ask("many again", tenant="many"), 0.0)
    assert "one" in [*end(brain, "many 0", 1.0), *end(brain, "many 1", 2.0)]


def test_nor_is_its_promise_taken_for_broken() -> None:
    brain = known(Limits(queue_s=0.0, hold_s=60.0))
    fill(brain)
    assert isinstance(brain.begin(ask("one", tenant="one", ttft_s=50.0), 0.0), Queued)


def test_what_waits_is_shared_by_the_decode_workers_where_no_other_ones_are_left() -> None:
    alone, four = (known(Limits(queue_s=0.0, hold_s=60.0), roles=(Role.DECODE,) * count) for count in (1, 4))
    waiting = [fill(brain) - 2 * count for brain, count in ((alone, 1), (four, 4))]
    assert waiting[1] == pytest.approx(4 * waiting[0], abs=4)


def test_the_only_tenant_has_all_places() -> None:
    brain = fleet(Limits(queue_s=0.0, hold_s=60.0, in_flight=90, shared=False))
    assert fill(brain) == 90
    assert brain.door.refused == {"full": 1}


def test_a_tenant_leaves_places_for_others() -> None:
    brain = fleet(Limits(queue_s=0.0, hold_s=60.0, in_flight=90))
    assert fill(brain) == 80
    assert brain.door.refused == {"tenant": 1}
    assert isinstance(brain.begin(ask("one", tenant="one"), 0.0), Queued)
    brain.finish("many 0", status=499, output_tokens=0, now=1.0)
    brain.finish("one", status=499, output_tokens=0, now=1.0)
    assert isinstance(brain.begin(ask("many again", tenant="many"), 1.0), Queued)
    brain.check_invariants()


def refusals(commands: list[Command]) -> list[Refuse]:
    return [command for command in commands if isinstance(command, Refuse)]


def promised(limits: Limits) -> Brain:
    """Two prompts of ten seconds each are before one that was promised its first token within 45."""
    brain = known(limits)
    for name, ttft_s in (("r0", None), ("r1", None), ("promised", 45.0)):
        brain.begin(ask(name, ttft_s=ttft_s), 0.0)
    assert brain.door.waiting.find("promised") is not None
    return brain


def slow_down(brain: Brain, s_per_token: float) -> None:
    for tokens in (50, 100, 200) * 30:
        learn(brain, "prefill-0", tokens, s_per_token * tokens)


def test_who_waits_is_refused_as_soon_as_its_prefill_alone_would_break_its_promise() -> None:
    brain = promised(Limits(queue_s=0.0, hold_s=600.0))
    assert refusals(brain.tick(34.0)) == []
    (refusal,) = refusals(brain.tick(36.0))
    assert "did not come in time" in refusal.reason
    assert brain.prefill_finished("r0", 0, 0, 36.1) == [DispatchDecode(request_id="r0")]


def test_a_promise_is_judged_again_at_the_turn_by_what_is_known_by_then() -> None:
    brain = promised(Limits(queue_s=0.0, hold_s=600.0))
    slow_down(brain, 0.4)
    (refusal,) = refusals(brain.prefill_finished("r0", 0, 0, 20.0))
    assert "first token is predicted" in refusal.reason
    assert (brain.loads.prefill_legs["prefill-0"], brain.door.refused) == (1, {"ttft": 1})
    timeline = brain.finish("promised", status=503, output_tokens=0, now=20.1)
    assert timeline.predicted is not None
    assert timeline.predicted.ttft_s > 25.0
    brain.check_invariants()


def test_one_refusal_at_a_turn_leaves_the_next_one_to_its_end() -> None:
    brain = promised(Limits(queue_s=0.0, hold_s=600.0))
    for name, ttft_s in (("late", 60.0), ("patient", None)):
        brain.begin(ask(name, ttft_s=ttft_s), 0.0)
    slow_down(brain, 2.0)
    told = refusals(brain.prefill_finished("r0", 0, 0, 20.0))
    for name in ("promised", "late"):
        assert [refusal.request_id for refusal in told] == [name]
        brain.finish(name, status=503, output_tokens=0, now=20.0)
        commands = brain.admit_waiting(20.0)
        told = refusals(commands)
    assert [type(command) for command in commands] == [Start]
    brain.check_invariants()


def test_routers_that_ask_the_same_workers_divide_their_kv() -> None:
    kinds = {}
    for share in (1.0, 0.5):
        brain = fleet(Limits(queue_s=1e9, hold_s=10.0, kv_share=share), kv_tokens=480)
        kinds[share] = [type(brain.begin(ask(f"r{number}"), 0.0)) for number in range(5)]
    assert kinds == {1.0: [Plan] * 4 + [Queued], 0.5: [Plan] * 2 + [Queued] * 3}


def test_crumbs_do_not_take_all_the_kv_that_one_waits_for() -> None:
    brain = known(Limits(queue_s=1e9, hold_s=1e9), kv_tokens=10_000, shared_chunk_tokens=16)
    brain.begin(ask("runs", 6000), 0.0)
    assert isinstance(brain.begin(ask("large", 6000), 0.0), Queued)
    kinds = [type(brain.begin(ask(f"crumb {number}", 50), 0.0)) for number in range(40)]
    tokens = brain.loads.kv_tokens["decode-1"]
    passed = kinds.index(Queued)
    assert 0.05 * 10_000 < tokens - 6020 <= 0.1 * 10_000
    assert kinds == [Plan] * passed + [Queued] * (40 - passed)
    assert end(brain, "runs", 1.0)[0] == "large"


def test_crumbs_pass_one_that_waits_for_p_alone_as_long_as_there_is_kv() -> None:
    brain = known(Limits(queue_s=200.0, hold_s=1e9), kv_tokens=10_000, shared_chunk_tokens=16)
    for number in range(3):
        brain.begin(ask(f"long {number}", 3000), 0.0)
    assert brain.door.waiting.find("long 2") is not None
    kinds = [type(brain.begin(ask(f"crumb {number}", 5), 0.0)) for number in range(60)]
    assert kinds == [Plan] * 60


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
    with pytest.raises(Overloaded, match="first token is predicted") as refused:
        brain.begin(ask("late", now=now, ttft_s=0.5), now)
    assert refused.value.after_s >= 1.0
    assert brain.door.refused == {"ttft": 1}
    timeline = brain.ledger.get("late")
    assert timeline is not None
    assert timeline.predicted is not None
    assert timeline.predicted.ttft_s > 0.5
    assert (timeline.status, timeline.path, timeline.refusal) == (503, "none", str(refused.value))
    assert isinstance(brain.begin(ask("patient", now=now, ttft_s=60.0), now), Plan)


def test_who_is_refused_before_anything_is_chosen_is_in_the_ledger_all_the_same() -> None:
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9)
    brain.register_worker(worker("p0", Role.PREFILL), 0.0)
    with pytest.raises(Overloaded, match="no worker that can write"):
        brain.begin(ask("early"), 0.0)
    timeline = brain.ledger.get("early")
    assert timeline is not None
    assert (timeline.status, timeline.predicted, timeline.report()["refusal"]) == (503, None, timeline.refusal)
    assert (brain.in_flight, brain.door.refused) == (0, {"no_worker": 1})
