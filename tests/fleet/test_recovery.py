"""Answers that lose their decode worker, or are to leave it: who may write on, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.errors import Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, DispatchDecode, Plan, Queued, Rest, Start
from kvrelay.fleet.member import Member
from kvrelay.fleet.workers import Roster
from kvrelay.policy.admit import Slo
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Manner, Pace
from kvrelay.types import Role, WorkerInfo
from tests.fleet.beats import PROMPT, WRITTEN, rest
from tests.fleet.known import Told, ask, known_brain, member, prompt_names
from tests.fleet.values import begun, store


def writing(brain: Brain, *, refusals: int = 0) -> str:
    """The D that writes ``r0``, after others have refused it."""
    begun(brain, ask("r0", PROMPT))
    for _ in range(refusals):
        brain.decode_order("r0", 0.1)
        assert brain.decode_refused("r0", 0.1)
    name = brain.decode_order("r0", 0.2).worker
    brain.first_token("r0", 0.4)
    return name


def leave(brain: Brain) -> Plan | None:
    return brain.recovery.hand_over("r0", rest(), reason=LossReason.DRAINED, now=1.0)


def test_an_answer_leaves_a_worker_that_drains_for_one_that_refused_it_long_ago() -> None:
    brain = known_brain([("p0", "s1")], [("d0", "s1"), ("d1", "s1")])
    lost = writing(brain, refusals=1)
    brain.drains.begin(lost, 1.0)
    assert leave(brain) is not None
    assert brain.decode_order("r0", 1.0).worker not in ("", lost)
    brain.check_invariants()


def test_an_answer_that_lost_its_worker_goes_on_at_one_that_refused_it_long_ago() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    writing(brain, refusals=1)
    plan = brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.0)
    assert isinstance(plan, Plan)


def test_whoever_failed_the_rest_is_not_asked_for_it_again() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    writing(brain)
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.0), Plan)
    with pytest.raises(Overloaded, match="no worker is left"):
        brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.1)


@pytest.mark.parametrize("asked", [False, True])
def test_who_was_to_write_the_rest_is_not_to_blame_before_it_is_asked(asked: bool) -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1"), ("d2", "s1")])
    first = writing(brain)
    brain.drains.begin(first, 1.0)
    assert leave(brain) is not None
    if asked:
        brain.decode_order("r0", 1.0)
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.UNASKED, now=1.0), Plan)
    assert len(brain.outcomes.breakers) == asked


def test_a_worker_that_drains_is_not_left_for_a_turn_that_has_not_come() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    worker = writing(brain)
    for number in range(1, 4):  # their prompts of two seconds each take all that may be computed again
        begun(brain, ask(f"r{number}", (20 + number, 2000)))
        brain.first_token(f"r{number}", 0.5)
        other = Rest(ask=ask(f"r{number}", (40 + number, 2000)), tokens=1)
        brain.recovery.lost(f"r{number}", other, reason=LossReason.RESET, now=0.9)
    brain.drains.begin(worker, 1.0)
    before, reserved = brain.ledger.get("r0"), dict(brain.loads.sequences)
    assert leave(brain) is None
    assert before is not None
    assert (before.resumptions, brain.loads.sequences) == ([], reserved), "nothing has changed"
    assert brain.decode_order("r0", 1.0).worker == worker
    brain.check_invariants()


def test_a_worker_that_is_to_have_work_again_is_not_left() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    worker = writing(brain)
    brain.drains.begin(worker, 1.0)
    brain.drains.undo(worker)
    assert leave(brain) is None
    assert brain.decode_order("r0", 1.0).worker == worker


def test_a_worker_that_is_drained_is_not_to_blame() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    for number in range(12):
        begun(brain, ask(f"r{number}", (number, 50)))
        brain.first_token(f"r{number}", 0.1)
    brain.drains.begin("d0", 1.0)
    for command in brain.drains.hand_over("d0", 1.0):
        name = command.request_id
        moved = Rest(ask=ask(name, (int(name[1:]), 50), (9, 40)), tokens=40)
        assert brain.recovery.hand_over(name, moved, reason=LossReason.DRAINED, now=1.0) is not None
    assert brain.loads.sequences["d0"] == 0
    brain.drains.undo("d0")
    assert brain.outcomes.breakers.allows("d0", 1.1)
    assert brain.outcomes.breakers.opened == 0


def replaying() -> Brain:
    """Two workers that can force tokens, and take some 10 ms for each."""
    brain = known_brain([], [])
    for name in ("d0", "d1"):
        info = member(name, Role.DECODE)
        able = msgspec.structs.replace(info, engine=msgspec.structs.replace(info.engine, replays=True))
        brain.register_worker(able, 0.0)
    return brain


@pytest.mark.parametrize(("tokens", "goes_on"), [(2_000, True), (4_000, False)])
def test_what_takes_too_long_to_write_again_is_not(tokens: int, goes_on: bool) -> None:
    brain = replaying()
    writing(brain)
    again = rest(manner=Manner.REPLAY, replay_tokens=tokens)
    with nullcontext() if goes_on else pytest.raises(Overloaded):
        brain.recovery.lost("r0", again, reason=LossReason.RESET, now=1.0)
    brain.check_invariants()


def test_a_worker_that_drains_keeps_what_would_take_too_long_elsewhere() -> None:
    brain = replaying()
    worker = writing(brain)
    brain.drains.begin(worker, 1.0)
    again = rest(manner=Manner.REPLAY, replay_tokens=4_000)
    assert brain.recovery.hand_over("r0", again, reason=LossReason.DRAINED, now=1.0) is None
    assert brain.decode_order("r0", 1.0).worker == worker
    assert brain.recovery.hand_over(
        "r0", rest(manner=Manner.REPLAY, replay_tokens=2_000), reason=LossReason.DRAINED, now=1.0
    )


@pytest.mark.parametrize(("now", "goes_on"), [(1.0, False), (20.0, True)])
def test_a_worker_whose_steps_took_long_some_time_ago_may_write_again(now: float, goes_on: bool) -> None:
    brain = replaying()
    writing(brain)
    begun(brain, ask("r1", (8, 200)))
    brain.first_token("r1", 0.5)
    assert brain.decode_order("r1", 0.5).worker != brain.decode_order("r0", 0.5).worker
    brain.silences.unanswered("r1", 0.5, 0.6, 1.0)
    again = rest(manner=Manner.REPLAY, replay_tokens=40)
    with nullcontext() if goes_on else pytest.raises(Overloaded):
        brain.recovery.lost("r0", again, reason=LossReason.RESET, now=now)


def test_a_worker_that_forgets_answers_is_not_to_blame() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    for number in range(12):
        begun(brain, ask(f"r{number}", (number, 50)))
        brain.first_token(f"r{number}", 0.1)
    for number in range(12):
        other = Rest(ask=ask(f"r{number}", (number, 50), (9, 40)), tokens=40)
        assert brain.recovery.lost(f"r{number}", other, reason=LossReason.FORGOTTEN, now=31.0) is not None
    assert (brain.outcomes.breakers.opened, len(brain.outcomes.breakers)) == (0, 0)


def reborn(brain: Brain, name: str, now: float) -> None:
    """The process of ``name`` is another one."""
    brain.register_worker(replace(member(name, Role.DECODE), incarnation="i2"), now)


def test_an_answer_waits_for_its_only_worker_to_start_again() -> None:
    brain = known_brain([], [("d0", "s1")])
    writing(brain)
    brain.members.link(member("d0", Role.DECODE), 1)
    brain.members.link(member("d0", Role.DECODE), -1)
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.0), Queued)
    assert list(brain.recovery.turn(1.5)) == []
    reborn(brain, "d0", 2.0)
    (start,) = brain.recovery.turn(2.0)
    assert isinstance(start, Start)
    brain.check_invariants()


def test_an_answer_goes_on_at_a_worker_that_failed_it_and_started_again_since() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    lost = writing(brain)
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.0), Plan)
    brain.members.link(member(lost, Role.DECODE), 1)
    brain.members.link(member(lost, Role.DECODE), -1)
    reborn(brain, lost, 2.0)
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=2.1), Plan)
    assert brain.decode_order("r0", 2.1).worker == lost
    brain.check_invariants()


def looks(waiting: int, monkeypatch: pytest.MonkeyPatch, hang_ups: int = 1) -> int:
    """How often all members are looked at for ``waiting`` answers that nobody can write, when clients hang up."""
    brain, count = known_brain([], [("d0", "s1"), ("d1", "s1")]), 0
    members = brain.fleet.workers
    for number in range(waiting):
        begun(brain, ask(f"r{number}", (number, 20)))
        brain.first_token(f"r{number}", 0.4)
    for name in ("d0", "d1"):
        members.stall(name, 1.0)
    for number in range(waiting):
        lost = Rest(ask=ask(f"r{number}", (number, 20)), tokens=1)
        assert isinstance(brain.recovery.lost(f"r{number}", lost, reason=LossReason.RESET, now=1.0), Queued)

    def each(roster: Roster[WorkerInfo]) -> Iterator[Member[WorkerInfo]]:
        nonlocal count
        count += roster is members
        return iter([roster._members[name] for name in sorted(roster._members)])

    with monkeypatch.context() as patch:
        patch.setattr(Roster, "__iter__", each)
        for number in range(hang_ups):
            assert list(brain.recovery.turn(1.1 + number * 1e-5)) == []
    return count


def test_members_are_looked_at_once_for_all_answers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= looks(1, monkeypatch) == looks(30, monkeypatch)


def test_clients_that_hang_up_together_do_not_have_all_that_wait_looked_at_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks(9, monkeypatch, hang_ups=500) == looks(9, monkeypatch)


# ---------------------------------------------------------------- no storm

DEATH_S, PROMPT_S = 1000.0, 2.0


def dying(brain: Brain, streams: int) -> dict[str, Rest]:
    """What is left of the answers that ``d0`` writes: their prompts take two seconds each and lie nowhere."""
    for number in range(streams):
        now = 20.0 * number
        begun(brain, ask(f"r{number}", (number, 2000), now=now), now)
        brain.first_token(f"r{number}", now + 5)
    rests = {}
    for number in range(streams):
        again = replace(ask(f"r{number}", (streams + number, 2000)), slo=Slo(priority=number % 3))
        if brain.decode_order(f"r{number}", DEATH_S).worker == "d0":
            rests[f"r{number}"] = Rest(ask=again, tokens=1)
    return rests


def test_a_death_with_many_streams_is_no_storm_of_prompts() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    rests = dying(brain, 40)
    plans = {
        name: brain.recovery.lost(name, rest, reason=LossReason.RESET, now=DEATH_S) for name, rest in rests.items()
    }
    assert len(plans) >= 10
    assert all(plans.values()), "nobody is given up"
    begun_s = {name: 0.0 for name, plan in plans.items() if isinstance(plan, Plan)}
    in_turn = []
    for tenth in range(1, 1200):
        for command in brain.recovery.turn(DEATH_S + tenth / 10):
            assert isinstance(command, Start)
            begun_s[command.request_id] = tenth / 10
            in_turn.append(rests[command.request_id].ask)
    assert begun_s.keys() == rests.keys(), "all begin"
    for count, after_s in enumerate(begun_s.values()):
        assert PROMPT_S * count <= 2 * (Pace().burst_s + Pace().share * after_s) + PROMPT_S, "half of two workers' time"
    assert max(begun_s.values()) < PROMPT_S * len(rests) + 2, "and no less than that"
    urgency = [again.slo.priority for again in in_turn if again is not None]
    assert urgency == sorted(urgency, reverse=True)
    assert len(set(urgency)) == 3


def test_short_prompts_pass_a_long_one_and_not_for_ever() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    losses = {"r0": (1.0, 4000), "r1": (1.0, 8000), "r2": (1.0, 2000), "r3": (2.0, 2000), "r4": (6.0, 4000)}
    for number, name in enumerate(losses):
        begun(brain, ask(name, (number, 2000)))
        brain.first_token(name, 0.5)
    turns = []
    for now in (tenth / 10 for tenth in range(10, 400)):
        for number, (name, (lost_s, tokens)) in enumerate(losses.items()):
            if lost_s == now:
                again = Rest(ask=ask(name, (40 + number, tokens)), tokens=1)
                plan = brain.recovery.lost(name, again, reason=LossReason.RESET, now=now)
                assert isinstance(plan, Plan if name == "r0" else Queued), "the first one has all that is spent at once"
        turns += [command.request_id for command in brain.recovery.turn(now)]
    assert turns == ["r2", "r3", "r1", "r4"]


def of_another_model(asked: Ask) -> Ask:
    return replace(asked, facts=replace(asked.facts, model="other"))


def test_deaths_of_one_model_keep_no_answer_of_another_one_waiting() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    for name in ("e0", "e1"):
        brain.register_worker(replace(member(name, Role.DECODE), model="other"), 0.0)
    for number in range(8):
        begun(brain, ask(f"r{number}", (number, 2000)))
        brain.first_token(f"r{number}", 0.5)
        other = of_another_model(ask(f"x{number}", (number, 2000)))
        begun(brain, other)
        brain.first_token(f"x{number}", 0.5)
    for number in range(8):
        again = Rest(ask=ask(f"r{number}", (40 + number, 2000)), tokens=1)
        brain.recovery.lost(f"r{number}", again, reason=LossReason.RESET, now=1.0)
    waiting = len(brain.recovery)
    assert waiting > 0
    other = of_another_model(ask("x0", (80, 2000)))
    assert isinstance(brain.recovery.lost("x0", Rest(ask=other, tokens=1), reason=LossReason.RESET, now=1.0), Plan)
    other = of_another_model(ask("x1", (81, 2000)))
    assert isinstance(brain.recovery.lost("x1", Rest(ask=other, tokens=1), reason=LossReason.RESET, now=1.0), Queued)
    assert "x1" in [command.request_id for command in brain.recovery.turn(1.2)]
    brain.check_invariants()


def test_a_death_before_the_first_words_is_no_storm_of_prompts_either() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    lost = []
    for number in range(20):
        begun(brain, ask(f"r{number}", (number, 2000)))
        if brain.decode_order(f"r{number}", 0.0).worker == "d0":
            lost.append(f"r{number}")
    at_once = [name for name in lost if isinstance(refused(brain, name), DispatchDecode)]
    assert len(at_once) == 1, "it has all that is spent at once"
    assert len(brain.recovery) == len(lost) - 1
    begun_s = {
        command.request_id: tenth / 10
        for tenth in range(10, 300)
        for command in brain.recovery.turn(tenth / 10)
        if isinstance(command, DispatchDecode)
    }
    assert sorted([*at_once, *begun_s]) == sorted(lost), "all are asked again"
    for count, now in enumerate(begun_s.values(), start=1):
        assert PROMPT_S * count <= 2 * (Pace().burst_s + Pace().share * (now - 1.0)) + PROMPT_S
    assert brain.decode_order(lost[-1], 30.0).worker == "d1"
    brain.check_invariants()


def refused(brain: Brain, name: str) -> DispatchDecode | Queued | None:
    return brain.decode_refused(name, 1.0, reason=LossReason.RESET)


# ---------------------------------------------------------------- how often


def lose(brain: Brain, tokens: int, now: float) -> None:
    """The D of ``r0`` dies after so many tokens; the next one writes, and the dead one is there again."""
    again = replace(rest(), tokens=tokens)
    lost = brain.recovery.decode_worker("r0")
    brain.recovery.lost("r0", again, reason=LossReason.RESET, now=now)
    brain.register_worker(replace(member(lost, Role.DECODE), incarnation=f"i{now}"), now)
    brain.decode_order("r0", now)
    brain.recovery.resumed("r0", 0.1, now + 1.0)


@pytest.mark.parametrize(("tokens", "deaths"), [(1, 8), (15, 8), (16, 32)])
def test_a_request_takes_more_workers_with_it_only_when_it_gets_on_between(tokens: int, deaths: int) -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    writing(brain)
    for number in range(1, deaths + 1):
        lose(brain, number * tokens, 100.0 * number)
    with pytest.raises(Overloaded, match="too often"):
        lose(brain, (deaths + 1) * tokens, 100.0 * (deaths + 1))


def test_to_be_moved_by_those_who_drain_workers_is_no_loss() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    worker = writing(brain)
    for number in range(1, 30):
        brain.drains.begin(worker, 100.0 * number)
        plan = brain.recovery.hand_over("r0", rest(), reason=LossReason.DRAINED, now=100.0 * number)
        assert plan is not None
        brain.drains.undo(worker)
        worker = brain.decode_order("r0", 100.0 * number).worker
        brain.recovery.resumed("r0", 0.1, 100.0 * number + 1)
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=9000.0), Plan)


# ---------------------------------------------------------------- by which strategy


@pytest.mark.parametrize(
    ("holder", "strategy"),
    [(None, "prefill"), (store("s1"), "restore"), (store("s2", "127.0.0.1:9002"), "replica"), ("engine", "engine")],
    ids=["nobody has it", "the store of the dead worker", "another store", "the engine that goes on"],
)
def test_the_strategy_that_won_is_kept(holder: object, strategy: str) -> None:
    brain = known_brain([], [("d0", "s1")])
    writing(brain)
    brain.register_worker(member("d1", Role.DECODE, "s1" if strategy == "restore" else "s2"), 0.5)
    if strategy == "replica":
        brain.members.register_store(replace(store("s2", "127.0.0.1:9002"), capacity_bytes=1 << 30), 0.5)
    if holder is not None:
        info = member("d1", Role.DECODE, "s2") if isinstance(holder, str) else holder
        Told(brain).has(info, prompt_names(PROMPT, WRITTEN), 0.6)  # type: ignore[arg-type]
    assert isinstance(brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.0), Plan)
    timeline = brain.ledger.get("r0")
    assert timeline is not None
    (loss,) = timeline.resumptions
    assert (loss.strategy, loss.worker) == (strategy, "d1")
