"""Prompts that share a prefix and come at once: one computes it, the others wait for it, and never longer than they
said."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import AbandonPrefill, DispatchDecode, SendPrefill
from kvrelay.policy.patience import held_until_s
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import PageChange, PageEvents, TransferEvent
from kvrelay.types import Medium, Role, Stage
from tests.fleet.known import PAGE, Told, ask, known_brain, member, prompt_names
from tests.fleet.values import begun, store

HOT = (7, 1000)
NEAR = [(f"p{number}", "s1") for number in range(4)]


def hot(number: int) -> tuple[tuple[int, int], ...]:
    """A prompt that begins as all others do, and ends like no other."""
    return HOT, (100 + number, 40)


def crowd(brain: Brain, count: int, now: float = 0.0) -> list[str]:
    """Requests that come at once; names of those that are not held back."""
    sent = []
    for number in range(count):
        plan = begun(brain, ask(f"r{number}", *hot(number), now=now), now)
        if plan.prefills:
            brain.prefill_sent(f"r{number}", now)
            sent.append(f"r{number}")
    return sent


def waits(brain: Brain, name: str) -> list[dict[str, object]]:
    line = brain.ledger.get(name)
    assert line is not None
    return [wait.report() for wait in line.waits]


def over(brain: Brain, count: int, now: float) -> None:
    """All requests end, and nothing is left of them."""
    for number in range(count):
        brain.finish(f"r{number}", status=200, output_tokens=1, now=now)
    brain.admit_waiting(now)
    brain.check_invariants()
    assert len(brain.prefixes.holds) == len(brain.prefixes.underway) == brain.in_flight == 0
    assert repr(brain.loads) == "<Loads 0 prefill legs, 0 sequences>"


def test_of_eight_that_come_at_once_one_computes_the_prefix_and_seven_wait_for_it() -> None:
    brain = known_brain(NEAR)
    assert crowd(brain, 8) == ["r0"]
    assert len(brain.prefixes.holds) == 7
    brain.check_invariants()
    (wait,) = waits(brain, "r1")
    assert (wait["source"], wait["origin"], wait["tokens"], wait["ending"]) == ("underway", "r0/0/0", 1000, "open")
    assert wait["predicted_s"] == pytest.approx(1.0, rel=0.1)

    released = brain.prefill_finished("r0", 0, 0, 1.1)
    sent = [command for command in released if isinstance(command, SendPrefill)]
    assert [command.request_id for command in sent] == [f"r{number}" for number in range(1, 8)]
    # They need 40 ms each, and are spread by that: the prefix is in the store that all have nearby.
    assert max(Counter(command.order.worker for command in sent).values()) <= 3
    (wait,) = waits(brain, "r1")
    assert (wait["waited_s"], wait["ending"]) == (1.1, "came")
    assert brain.ledger.get("r1").report()["events"]["prefix_ready"] == 1.1  # type: ignore[union-attr, index]
    over(brain, 8, 2.0)


def test_what_was_held_back_counts_as_asked_when_it_is_sent() -> None:
    brain = known_brain(NEAR)
    crowd(brain, 2)
    (sent,) = [each for each in brain.prefill_finished("r0", 0, 0, 1.1) if isinstance(each, SendPrefill)]
    brain.outcomes.breakers.failed(sent.order.worker, "another", 0.5)
    brain.prefill_finished("r1", 0, 0, 1.2)
    assert len(brain.outcomes.breakers) == 0, "it answered what it was asked after it had failed"


def test_prompts_without_a_common_prefix_wait_for_nobody() -> None:
    brain = known_brain(NEAR)
    for number in range(8):
        assert begun(brain, ask(f"r{number}", (number, 1000))).prefills
    over(brain, 8, 1.0)


def test_a_prefix_that_is_computed_sooner_than_a_message_takes_is_not_waited_for() -> None:
    brain = known_brain(NEAR)
    for number in range(4):
        assert begun(brain, ask(f"r{number}", (7, 8), (100 + number, 40))).prefills
    over(brain, 4, 1.0)


def test_where_prompts_are_computed_one_after_the_other_nobody_is_held_back_for_his_own_worker() -> None:
    brain = known_brain([("p0", "s1")], shares=False)
    assert crowd(brain, 4) == ["r0", "r1", "r2", "r3"]
    assert brain.ledger.get("r3").predicted.cached_tokens == 1000  # type: ignore[union-attr]
    over(brain, 4, 9.0)


def test_when_its_prefix_has_a_long_queue_before_it_a_prompt_is_computed_elsewhere() -> None:
    brain = known_brain([("p0", "s1"), ("p1", "s2")], [("d0", "s1")])
    first = begun(brain, ask("r0", (1, 3000))).prefills[0].worker
    busy = begun(brain, ask("r1", (2, 3000))).prefills[0].worker
    assert {first, busy} == {"p0", "p1"}
    brain.prefill_finished("r1", 0, 0, 3.0)
    begun(brain, ask("r2", (1, 3000), (5, 1000)), 0.0)
    # What r2 computes comes after r0; whoever wants it from 2,000 tokens on has it sooner alone.
    plan = begun(brain, ask("r3", (1, 100), (6, 100)))
    assert plan.prefills
    over(brain, 4, 9.0)


def test_a_prefix_is_waited_for_only_until_its_own_pages_are_there() -> None:
    """The first prompt goes on for ten seconds after the part that they share."""
    brain = known_brain(NEAR)
    begun(brain, ask("r0", HOT, (9, 10_000)))
    assert not begun(brain, ask("r1", *hot(1))).prefills
    told, pages = Told(brain), prompt_names(HOT)
    assert told.has(store(), pages[:100], 0.5) == []
    (command,) = told.has(store(), pages[100:], 1.0)
    assert isinstance(command, SendPrefill)
    assert (command.request_id, waits(brain, "r1")[0]["ending"]) == ("r1", "came")
    over(brain, 2, 9.0)


def test_pages_that_another_node_has_do_not_end_a_wait() -> None:
    brain = known_brain(NEAR, [("d0", "s2")])
    crowd(brain, 2)
    assert Told(brain).has(store("s2", "127.0.0.1:9002"), prompt_names(HOT), 0.5) == []
    over(brain, 2, 9.0)


def test_a_transfer_that_has_arrived_ends_a_wait_before_p_s_own_answer() -> None:
    brain = known_brain(NEAR)
    crowd(brain, 2)
    brain.transfer_event(TransferEvent(store="s1", transfer="r0/0/0", stage=Stage.STARTED), 0.1)
    told = brain.transfer_event(TransferEvent(store="s1", transfer="r0/0/0", stage=Stage.ARRIVED), 1.0)
    assert [type(command) for command in told] == [DispatchDecode, SendPrefill]
    assert [command.request_id for command in told] == ["r0", "r1"]
    over(brain, 2, 9.0)


def test_who_waits_for_a_worker_that_stalls_goes_elsewhere_after_its_time_and_waits_no_more() -> None:
    brain = known_brain(NEAR)
    crowd(brain, 8)
    stalled = brain.ledger.get("r0").prefill_worker  # type: ignore[union-attr]
    predicted = [float(waits(brain, f"r{number}")[0]["predicted_s"]) for number in range(1, 8)]  # type: ignore[arg-type]
    assert brain.tick(held_until_s(0.0, min(predicted)) - 0.01) == []
    commands = brain.tick(held_until_s(0.0, max(predicted)) + 0.01)
    sent = [command for command in commands if isinstance(command, SendPrefill)]
    assert {command.request_id for command in sent} == {f"r{number}" for number in range(1, 8)}
    assert stalled not in {command.order.worker for command in sent}
    assert {str(waits(brain, f"r{number}")[0]["ending"]) for number in range(1, 8)} == {"late"}
    assert len(brain.prefixes.holds) == 0
    over(brain, 8, 9.0)


def test_with_one_p_alone_who_waited_too_long_goes_there_all_the_same() -> None:
    brain = known_brain([("p0", "s1")])
    crowd(brain, 2)
    (command,) = brain.tick(5.0)
    assert isinstance(command, SendPrefill)
    assert command.order.worker == "p0"
    over(brain, 2, 9.0)


@pytest.mark.parametrize("how", ["its P fails", "its client leaves"])
def test_when_the_first_dies_another_computes_the_prefix_and_the_rest_waits_for_it(how: str) -> None:
    brain = known_brain(NEAR)
    crowd(brain, 8)
    if how == "its P fails":
        commands = brain.prefill_failed("r0", 0, 0.3)
        assert isinstance(commands[0], SendPrefill)
        assert commands[0].order.transfer == "r0/0/1"
    else:
        brain.finish("r0", status=499, output_tokens=0, now=0.3)
        commands = brain.admit_waiting(0.3)
    # One computes, whoever it is: the others wait a second time.
    assert len([command for command in commands if isinstance(command, SendPrefill)]) == 1
    assert len(brain.prefixes.holds) in (6, 7)
    endings = [[wait["ending"] for wait in waits(brain, f"r{number}")] for number in range(1, 8)]
    assert all(ending[0] == "lost" for ending in endings)
    brain.check_invariants()
    for number in range(1 if how != "its P fails" else 0, 8):
        brain.finish(f"r{number}", status=200, output_tokens=1, now=1.0)
    brain.admit_waiting(1.0)
    brain.check_invariants()
    assert repr(brain.loads) == "<Loads 0 prefill legs, 0 sequences>"


def test_nobody_waits_more_than_twice_however_often_the_first_dies() -> None:
    brain = known_brain([(f"p{number}", "s1") for number in range(8)])
    crowd(brain, 8)
    computing = ["r0"]
    for turn in range(7):
        commands = brain.prefill_failed(computing.pop(0), 0, 0.1 + turn / 10, blamed=False)
        computing += [command.request_id for command in commands if isinstance(command, SendPrefill)]
    assert max(len(waits(brain, f"r{number}")) for number in range(8)) == 2
    brain.tick(60.0)
    assert len(brain.prefixes.holds) == 0
    over(brain, 8, 61.0)


def test_a_p_that_goes_away_is_not_sent_what_was_held_back_for_it() -> None:
    brain = known_brain(NEAR)
    crowd(brain, 8)
    line = brain.ledger.get("r1")
    assert line is not None
    gone, leader = line.prefill_worker, brain.ledger.get("r0").prefill_worker  # type: ignore[union-attr]
    assert gone is not None
    commands = brain.leaving(member(gone, Role.PREFILL), 0.0)
    commands += brain.tick(0.1)
    assert [command for command in commands if isinstance(command, AbandonPrefill)] == (
        [AbandonPrefill(request_id="r0", index=0)] if gone == leader else []
    )
    assert line.prefill_worker != gone
    assert waits(brain, "r1")[0]["ending"] == "lost"
    over(brain, 8, 9.0)


def test_a_request_that_ends_while_it_waits_leaves_nothing() -> None:
    brain = known_brain(NEAR)
    crowd(brain, 3)
    brain.finish("r1", status=499, output_tokens=0, now=0.2)
    assert len(brain.prefixes.holds) == 1
    released = brain.prefill_finished("r0", 0, 0, 1.0)
    assert [command.request_id for command in released if isinstance(command, SendPrefill)] == ["r2"]
    for name in ("r0", "r2"):
        brain.finish(name, status=200, output_tokens=1, now=2.0)
    brain.admit_waiting(2.0)
    brain.check_invariants()
    assert repr(brain.loads) == "<Loads 0 prefill legs, 0 sequences>"


def test_who_waits_is_waited_for_in_turn() -> None:
    """r1 adds a second part to the prefix, and r2 shares both: it waits for r1, which waits for r0."""
    brain = known_brain(NEAR)
    begun(brain, ask("r0", HOT, (8, 40)))
    assert not begun(brain, ask("r1", HOT, (9, 2000))).prefills
    assert not begun(brain, ask("r2", HOT, (9, 2000), (5, 40))).prefills
    assert waits(brain, "r2")[0]["origin"] == "r1/0/0"
    assert float(waits(brain, "r2")[0]["predicted_s"]) == pytest.approx(3.0, rel=0.1)  # type: ignore[arg-type]
    assert [each.request_id for each in brain.prefill_finished("r0", 0, 0, 1.0)][-1] == "r1"
    assert [each.request_id for each in brain.prefill_finished("r1", 0, 1000, 3.0)][-1] == "r2"
    over(brain, 3, 9.0)


def test_workers_that_do_both_wait_for_one_another_s_prompts_too() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    plans = [begun(brain, ask(f"r{number}", *hot(number))) for number in range(4)]
    assert {plan.path for plan in plans} == {Path.LOCAL}
    assert [plan.held for plan in plans] == [False, True, True, True]
    released = brain.first_token("r0", 1.1)
    assert released == [DispatchDecode(request_id=f"r{number}") for number in (1, 2, 3)]
    for number in range(4):
        brain.decode_order(f"r{number}", 1.1)
    over(brain, 4, 9.0)


def test_a_d_that_waits_for_a_prefix_goes_ahead_when_it_is_late() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    begun(brain, ask("r0", *hot(0)))
    assert begun(brain, ask("r1", *hot(1))).held
    assert brain.tick(1.0) == []
    assert brain.tick(2.0) == [DispatchDecode(request_id="r1")]
    over(brain, 2, 9.0)


def test_who_waits_for_a_d_that_refuses_its_own_prompt_goes_ahead() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    begun(brain, ask("r0", *hot(0)))
    assert begun(brain, ask("r1", *hot(1))).held
    assert brain.decode_refused("r0", 0.1)
    assert brain.tick(0.2) == [DispatchDecode(request_id="r1")]
    over(brain, 2, 9.0)


def test_a_late_work_is_expected_to_be_late_by_as_much_again() -> None:
    brain = known_brain(NEAR)
    begun(brain, ask("r0", HOT))
    work = brain.prefixes.underway.get("r0/0/0")
    assert work is not None
    pages = HOT[1] // PAGE
    assert work.remaining_s(pages, 0.0) == pytest.approx(1.0, rel=0.01)
    assert work.remaining_s(pages // 2, 0.0) == pytest.approx(0.5, rel=0.01)
    assert work.remaining_s(pages, 1.0) == pytest.approx(0.0, abs=0.01)
    assert work.remaining_s(pages, 3.0) == pytest.approx(2.0, rel=0.01)
    brain.transfer_event(TransferEvent(store="s1", transfer="r0/0/0", stage=Stage.STARTED), 3.0)
    assert work.remaining_s(pages, 3.0) == pytest.approx(1.0, rel=0.01)
    over(brain, 1, 9.0)


def test_without_any_p_a_prompt_whose_prefix_is_known_is_computed_by_d() -> None:
    brain = known_brain([], [("d0", "s1")])
    Told(brain).has(store(), prompt_names(HOT), 0.0)
    assert begun(brain, ask("r0", *hot(0))).path is Path.LOCAL
    over(brain, 1, 1.0)


def test_an_answer_that_comes_in_one_piece_ends_the_wait_for_its_prompt() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    begun(brain, ask("r0", *hot(0)))
    assert begun(brain, ask("r1", *hot(1))).held
    seen = brain.experience.prefill("d0").seen
    assert brain.answered("r0", 1.0) == [DispatchDecode(request_id="r1")]
    assert waits(brain, "r1")[0]["ending"] == "came"
    assert brain.experience.prefill("d0").seen == seen, "nobody knows when its first token was there"
    over(brain, 2, 1.1)


def test_an_answer_in_one_piece_of_two_workers_is_a_hand_off() -> None:
    brain = known_brain(NEAR)
    begun(brain, ask("r0", *hot(0)))
    brain.prefill_finished("r0", 0, 0, 1.0)
    before = brain.experience.handoffs
    brain.answered("r0", 1.2)
    assert brain.experience.handoffs == before + 1
    over(brain, 1, 1.3)


def test_pages_of_a_former_life_end_no_wait() -> None:
    brain = known_brain(NEAR)
    crowd(brain, 2)
    former = msgspec.structs.replace(store("s1"), incarnation="former")
    change = PageChange(Medium.MEMORY, [], list(prompt_names(HOT)))
    event = PageEvents(incarnation="former", sequence=1, changes=[change])
    assert brain.pages(former, event, 0.1) == (None, [])
    assert waits(brain, "r1")[0]["ending"] == "open"
    assert Told(brain).has(store("s1"), prompt_names(HOT), 0.2), "and those that count do"


@pytest.mark.parametrize("how", ["reborn", "leaves"])
def test_who_was_to_go_to_a_p_that_is_gone_goes_elsewhere_at_once(how: str) -> None:
    brain = known_brain(NEAR)
    crowd(brain, 8)
    gone = next(name for number in range(1, 8) if (name := _p_of(brain, number)) != _p_of(brain, 0))
    moved = [f"r{number}" for number in range(1, 8) if _p_of(brain, number) == gone]
    if how == "leaves":
        brain.leaving(member(gone, Role.PREFILL), 0.1)
    else:
        brain.register_worker(msgspec.structs.replace(member(gone, Role.PREFILL), incarnation="i2"), 0.1)
    assert all(waits(brain, name)[0]["ending"] == "lost" for name in moved)
    brain.check_invariants()


def _p_of(brain: Brain, number: int) -> str:
    return str(brain.ledger.get(f"r{number}").prefill_worker)  # type: ignore[union-attr]


def test_a_prompt_that_is_held_back_is_no_work_of_its_worker_until_it_is_sent() -> None:
    brain = known_brain([("p0", "s1"), ("p1", "s1")])
    begun(brain, ask("r0", (7, 5000)))
    assert not begun(brain, ask("r1", (7, 5000), (9, 1000))).prefills
    leader, idle = _p_of(brain, 0), _p_of(brain, 1)
    assert leader != idle
    for now in (0.0, 2.0):
        assert (brain.loads.wait_s(idle, now), brain.loads.prompts(idle)) == (0.0, 0)
        assert brain.loads.held_s(idle) == pytest.approx(1.0, rel=0.5), "it does not get shorter while it waits"
    brain.check_invariants()
    assert brain.prefill_finished("r0", 0, 0, 5.0)
    assert (brain.loads.held_s(idle), brain.loads.prompts(idle)) == (0.0, 1)
    assert brain.loads.wait_s(idle, 5.0) == pytest.approx(1.0, rel=0.5)
    brain.check_invariants()
