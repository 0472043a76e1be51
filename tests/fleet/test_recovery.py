"""Answers that lose their decode worker, or are to leave it: who counts as lost, and who may write on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import Learned, kind_of
from kvrelay.fleet.flight import AbandonDecode, Command, Plan, Refuse, Rest, Start, Waits
from kvrelay.fleet.workers import Member, Roster
from kvrelay.policy.admit import Slo
from kvrelay.policy.recover import Manner, Pace
from kvrelay.protocol.feed import Heartbeat, TransferEvent
from kvrelay.types import Role, Stage, WorkerInfo
from tests.fleet.known import PERF, ask, known_brain, member
from tests.fleet.values import begun, store

PROMPT, WRITTEN = (7, 200), (9, 400)


def writing(brain: Brain, *, refusals: int = 0) -> str:
    """The D that writes ``r0``, after others have refused it."""
    begun(brain, ask("r0", PROMPT))
    for _ in range(refusals):
        brain.decode_order("r0", 0.1)
        assert brain.decode_refused("r0", 0.1)
    name = brain.decode_order("r0", 0.2).worker
    brain.first_token("r0", 0.4)
    return name


def rest(**more: Any) -> Rest:
    return Rest(ask=ask("r0", PROMPT, WRITTEN), tokens=40, **more)


def leave(brain: Brain) -> Plan | None:
    return brain.recovery.hand_over("r0", rest(), reason="drained", now=1.0)


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
    plan = brain.recovery.lost("r0", rest(), reason="reset", now=1.0)
    assert isinstance(plan, Plan)


def test_whoever_failed_the_rest_is_not_asked_for_it_again() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    writing(brain)
    assert isinstance(brain.recovery.lost("r0", rest(), reason="reset", now=1.0), Plan)
    assert brain.recovery.lost("r0", rest(), reason="reset", now=1.1) is None


def test_a_worker_that_drains_is_not_left_for_a_turn_that_has_not_come() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    worker = writing(brain)
    for number in range(1, 4):  # their prompts of two seconds each take all that may be computed again
        begun(brain, ask(f"r{number}", (20 + number, 2000)))
        brain.first_token(f"r{number}", 0.5)
        other = Rest(ask=ask(f"r{number}", (40 + number, 2000)), tokens=1)
        brain.recovery.lost(f"r{number}", other, reason="reset", now=0.9)
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
        assert brain.recovery.hand_over(name, moved, reason="drained", now=1.0) is not None
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
    assert (brain.recovery.lost("r0", again, reason="reset", now=1.0) is not None) is goes_on
    brain.check_invariants()


def test_a_worker_that_drains_keeps_what_would_take_too_long_elsewhere() -> None:
    brain = replaying()
    worker = writing(brain)
    brain.drains.begin(worker, 1.0)
    again = rest(manner=Manner.REPLAY, replay_tokens=4_000)
    assert brain.recovery.hand_over("r0", again, reason="drained", now=1.0) is None
    assert brain.decode_order("r0", 1.0).worker == worker
    assert brain.recovery.hand_over("r0", rest(manner=Manner.REPLAY, replay_tokens=2_000), reason="drained", now=1.0)


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
    plans = {name: brain.recovery.lost(name, rest, reason="reset", now=DEATH_S) for name, rest in rests.items()}
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
                plan = brain.recovery.lost(name, again, reason="reset", now=now)
                assert isinstance(plan, Plan if name == "r0" else Waits), "the first one has all that is spent at once"
        turns += [command.request_id for command in brain.recovery.turn(now)]
    assert turns == ["r2", "r3", "r1", "r4"]


# ---------------------------------------------------------------- who hangs


class Beats:
    """A fleet with short leases whose members say that they live."""

    def __init__(self, *decodes: str, known: bool = False) -> None:
        """``known``: what they take for a token."""
        self.brain = Brain(dead_after_s=2.0, transfer_wait_s=60.0, local_prefill=False)
        self.now = 0.1
        if known:
            self.brain.experience.recall(Learned(kinds={kind_of(member("any", Role.DECODE).engine): PERF}, handoffs=0))
        self.brain.members.register_store(store(), 0.0)
        self.workers = [member("p0", Role.PREFILL), *(member(name, Role.DECODE) for name in decodes)]
        for info in self.workers:
            self.brain.register_worker(info, 0.0)

    def silent(self, until_s: float, *, mute: Collection[str] = (), p_steps: bool = True) -> AbandonDecode | None:
        """D writes nothing from 0.1 s on; the first command to leave it. Workers beat unless they are ``mute``, and
        only P makes progress."""
        for tenth in range(1, round(until_s * 10)):
            now = tenth / 10
            for info in self.workers:
                if info.name not in mute:
                    steps = tenth if info.name == "p0" and p_steps else 0
                    self.brain.members.heartbeat(
                        info,
                        Heartbeat(
                            name=info.name, incarnation=info.incarnation, healthy=True, counts={}, progress=steps
                        ),
                        now,
                    )
            for command in self.brain.silences.unanswered("r0", 0.1, now):
                assert isinstance(command, AbandonDecode)
                return command
        return None

    @property
    def decode(self) -> str:
        """The D of ``r0``."""
        return self.brain.decode_order("r0", self.now).worker

    def steps(self, now: float, *, hangs: str = "") -> None:
        """All beat; all but one make progress."""
        self.now = now
        for info in self.workers:
            member = self.brain.fleet.workers.get(info.name)
            assert member is not None, "it is registered"
            done = member.progress if info.name == hangs else round(now * 1000)
            beat = Heartbeat(name=info.name, incarnation=info.incarnation, healthy=True, counts={}, progress=done)
            self.brain.members.heartbeat(info, beat, now)

    def asked(self) -> str:
        """``r0`` is with P and with D; its transfer."""
        begun(self.brain, ask("r0", (7, 1000)))
        transfer = "r0/0/0"
        self.brain.prefill_sent("r0", 0.0)
        self.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.LAST_CHUNK), 0.1)
        self.brain.decode_order("r0", 0.1)
        return transfer


@pytest.mark.parametrize("computed", [False, True], ids=["P computes", "pages travel"])
def test_a_d_that_waits_for_pages_does_not_hang(computed: bool) -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    if computed:
        beats.brain.prefill_finished("r0", 0, 0, 0.2)
    assert beats.silent(9.0) is None
    assert (beats.brain.silences.stalls, len(beats.brain.fleet.workers.usable(9.0))) == (0, 3)


def test_a_d_that_has_all_pages_and_makes_no_progress_hangs() -> None:
    beats = Beats("d0", "d1")
    transfer = beats.asked()
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    beats.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.ARRIVED), 0.3)
    assert beats.silent(9.0) is not None
    assert beats.brain.silences.stalls == 1


def test_a_d_that_falls_silent_hangs_whatever_it_waited_for() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    assert beats.silent(9.0, mute={beats.decode}) is not None


def test_nobody_leaves_a_d_for_another_one_that_is_as_silent() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    assert beats.silent(1.9, mute={"d0", "d1"}) is None
    assert beats.brain.silences.stalls == 0


def test_the_rest_goes_to_one_that_is_heard() -> None:
    beats = Beats("d0", "d1", "d2")
    beats.asked()
    lost = beats.decode
    mute = next(name for name in ("d0", "d1", "d2") if name != lost)
    beats.silent(1.9, mute={mute})
    assert beats.brain.fleet.workers.is_usable(mute, 1.9)
    beats.brain.first_token("r0", 1.9)
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason="reset", now=1.9), Plan)
    assert beats.decode not in (lost, mute)


def test_an_answer_that_was_moved_without_a_word_bears_longer_pauses_of_workers() -> None:
    beats = Beats("d0", "d1", "d2")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    waits_s = []
    for _ in range(2):
        lost, since_s = beats.decode, beats.now
        beats.steps(beats.now + 0.1)
        while not beats.brain.silences.unanswered("r0", since_s, beats.now):
            beats.steps(beats.now + 0.1, hangs=lost)
        waits_s.append(beats.now - since_s)
        assert isinstance(beats.brain.recovery.lost("r0", rest(), reason="silent", now=beats.now), Plan)
    assert 1.5 < waits_s[0] < 1.8
    assert 2.0 < waits_s[1] < 2.4


def lost_in_silence(beats: Beats) -> None:
    """``r0`` lost its worker's connection, after 3 s in which this router heard nobody."""
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason="reset", now=3.2), Waits)
    assert list(beats.brain.recovery.turn(3.3)) == []


def test_an_answer_that_nobody_can_write_at_the_moment_goes_on_once_somebody_is_heard() -> None:
    beats = Beats("d0", "d1")
    lost_in_silence(beats)
    beats.steps(3.4)
    (start,) = beats.brain.recovery.turn(3.4)
    assert isinstance(start, Start)
    assert len(beats.brain.recovery) == 0


def reborn(brain: Brain, name: str, now: float) -> None:
    """The process of ``name`` is another one."""
    brain.register_worker(replace(member(name, Role.DECODE), incarnation="i2"), now)


def test_an_answer_waits_for_its_only_worker_to_start_again() -> None:
    brain = known_brain([], [("d0", "s1")])
    writing(brain)
    brain.members.link(member("d0", Role.DECODE), 1)
    brain.members.link(member("d0", Role.DECODE), -1)
    assert isinstance(brain.recovery.lost("r0", rest(), reason="reset", now=1.0), Waits)
    assert list(brain.recovery.turn(1.5)) == []
    reborn(brain, "d0", 2.0)
    (start,) = brain.recovery.turn(2.0)
    assert isinstance(start, Start)
    brain.check_invariants()


def test_an_answer_goes_on_at_a_worker_that_failed_it_and_started_again_since() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    lost = writing(brain)
    assert isinstance(brain.recovery.lost("r0", rest(), reason="reset", now=1.0), Plan)
    brain.members.link(member(lost, Role.DECODE), 1)
    brain.members.link(member(lost, Role.DECODE), -1)
    reborn(brain, lost, 2.0)
    assert isinstance(brain.recovery.lost("r0", rest(), reason="reset", now=2.1), Plan)
    assert brain.decode_order("r0", 2.1).worker == lost
    brain.check_invariants()


def looks(waiting: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often all members are looked at for ``waiting`` answers that nobody can write."""
    brain, count = known_brain([], [("d0", "s1"), ("d1", "s1")]), 0
    members = brain.fleet.workers
    for number in range(waiting):
        begun(brain, ask(f"r{number}", (number, 20)))
        brain.first_token(f"r{number}", 0.4)
    for name in ("d0", "d1"):
        members.stall(name, 1.0)
    for number in range(waiting):
        lost = Rest(ask=ask(f"r{number}", (number, 20)), tokens=1)
        assert isinstance(brain.recovery.lost(f"r{number}", lost, reason="reset", now=1.0), Waits)

    def each(roster: Roster[WorkerInfo]) -> Iterator[Member[WorkerInfo]]:
        nonlocal count
        count += roster is members
        return iter([roster._members[name] for name in sorted(roster._members)])

    with monkeypatch.context() as patch:
        patch.setattr(Roster, "__iter__", each)
        assert list(brain.recovery.turn(1.1)) == []
    return count


def test_members_are_looked_at_once_for_all_answers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= looks(1, monkeypatch) == looks(30, monkeypatch)


def test_nobody_waits_for_ever_for_a_worker_that_could_write() -> None:
    beats = Beats("d0", "d1")
    lost_in_silence(beats)
    assert list(beats.brain.recovery.turn(6.1)) == []
    (refuse,) = beats.brain.recovery.turn(9.3)
    assert isinstance(refuse, Refuse)
    assert "no worker is left" in refuse.reason


def test_answers_that_wait_for_their_turn_outlive_a_moment_in_which_nobody_is_heard() -> None:
    beats = Beats("d0", "d1", known=True)
    recovery, names = beats.brain.recovery, [f"r{number}" for number in range(80)]
    for number, name in enumerate(names):
        begun(beats.brain, ask(name, (number, 500)))
        beats.brain.first_token(name, 0.1)
    beats.steps(0.2)
    names = [name for name in names if recovery.writer(name) == "d0"]
    started: list[Command | Plan] = []
    for number, name in enumerate(names):
        plan = recovery.lost(name, Rest(ask=ask(name, (100 + number, 500)), tokens=1), reason="reset", now=0.2)
        started += [plan] if isinstance(plan, Plan) else []
    while beats.now < 7.0:
        beats.steps(beats.now + 0.2)
        started += recovery.turn(beats.now)
    assert len(recovery) >= 3, "they have waited longer for their turn than anybody does for a worker"
    for tenth in range(100, 130):
        assert list(recovery.turn(tenth / 10)) == []
    told = beats.brain.standings.of(next(name for name in names if recovery.waiting(name)), None, 12.9)
    assert (told.waits_for, told.given_up_s) == ("writer", recovery.leave_s)
    while beats.now < 30.0:
        beats.steps(max(13.0, beats.now + 0.2))
        started += recovery.turn(beats.now)
    assert len(started) == len(names)
    assert not any(isinstance(command, Refuse) for command in started)


def test_an_answer_that_came_slowly_is_waited_for_as_long_as_eight_of_its_words_take() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    lost = beats.decode
    beats.steps(0.2)
    commands: list[Command] = []
    while not commands and beats.now < 60.0:
        beats.steps(beats.now + 0.1, hangs=lost)
        commands = beats.brain.silences.unanswered("r0", 0.1, beats.now, 1.0)
    assert commands == [AbandonDecode(request_id="r0", reason="silent")]
    assert 8.0 < beats.now < 8.4


def test_a_worker_that_stands_still_is_not_waited_for_much_longer_however_slow_it_was() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    lost = beats.decode
    beats.steps(0.2)
    commands: list[Command] = []
    while not commands and beats.now < 60.0:
        beats.steps(beats.now + 0.1, hangs=lost)
        commands = beats.brain.silences.unanswered("r0", 0.1, beats.now, 10.0)
    assert commands == [AbandonDecode(request_id="r0", reason="silent")]
    assert beats.now < 30.5


def test_a_stream_is_waited_for_at_its_own_pace_and_not_at_that_of_others() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    lost = beats.decode
    for number in range(1, 5):
        begun(beats.brain, ask(f"r{number}", (8, 1000)))
        beats.brain.first_token(f"r{number}", 0.1)
        beats.brain.silences.unanswered(f"r{number}", 0.1, 0.1, 5.0)
    assert beats.brain.silences.silence_s(lost, 0.1) == 30.0, "who has no pace of its own"
    beats.steps(0.2)
    commands: list[Command] = []
    while not commands and beats.now < 60.0:
        beats.steps(beats.now + 0.1, hangs=lost)
        commands = beats.brain.silences.unanswered("r0", 0.2, beats.now, 0.03)
    assert commands == [AbandonDecode(request_id="r0", reason="silent")]
    assert beats.now - 0.2 < 1.8


@pytest.mark.parametrize(("now", "goes_on"), [(1.0, False), (20.0, True)])
def test_a_worker_whose_steps_took_long_some_time_ago_may_write_again(now: float, goes_on: bool) -> None:
    brain = replaying()
    writing(brain)
    begun(brain, ask("r1", (8, 200)))
    brain.first_token("r1", 0.5)
    assert brain.decode_order("r1", 0.5).worker != brain.decode_order("r0", 0.5).worker
    brain.silences.unanswered("r1", 0.5, 0.6, 1.0)
    again = rest(manner=Manner.REPLAY, replay_tokens=40)
    assert (brain.recovery.lost("r0", again, reason="reset", now=now) is not None) is goes_on


def test_an_answer_that_its_busy_worker_has_forgotten_goes_on_elsewhere() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    commands: list[Command] = []
    while not commands and beats.now < 60.0:
        beats.steps(beats.now + 0.5)
        commands = beats.brain.silences.unanswered("r0", 0.1, beats.now)
    assert commands == [AbandonDecode(request_id="r0", reason="forgotten")]
    assert 30.0 < beats.now < 31.0
    assert beats.brain.silences.stalls == 0, "its worker works"


def moved(beats: Beats) -> str:
    """``r0`` goes on at a second worker, its name, which has not written a word of it."""
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason="reset", now=0.2), Plan)
    return beats.decode


@pytest.mark.parametrize("others", [(), ("d2",)], ids=["the first one is well again", "there is a third one"])
def test_a_moved_answer_that_its_busy_worker_has_forgotten_goes_on_elsewhere(others: tuple[str, ...]) -> None:
    beats = Beats("d0", "d1", *others)
    second = moved(beats)
    commands: list[Command] = []
    while not commands and beats.now < 200.0:
        beats.steps(beats.now + 0.5)
        commands = beats.brain.silences.unanswered("r0", 0.2, beats.now)
    assert commands == [AbandonDecode(request_id="r0", reason="forgotten")]
    assert 60.0 < beats.now < 61.0, "it may have queued"
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason="forgotten", now=beats.now), Plan)
    assert beats.decode != second
    beats.brain.check_invariants()


def test_a_worker_that_forgets_answers_is_not_to_blame() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    for number in range(12):
        begun(brain, ask(f"r{number}", (number, 50)))
        brain.first_token(f"r{number}", 0.1)
    for number in range(12):
        other = Rest(ask=ask(f"r{number}", (number, 50), (9, 40)), tokens=40)
        assert brain.recovery.lost(f"r{number}", other, reason="forgotten", now=31.0) is not None
    assert (brain.outcomes.breakers.opened, len(brain.outcomes.breakers)) == (0, 0)


def test_nobody_waits_for_pages_for_ever() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    assert beats.silent(59.0) is None
    assert beats.silent(62.0) is not None


def test_the_only_d_gets_work_however_long_it_is_silent() -> None:
    beats = Beats("d0")
    transfer = beats.asked()
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    beats.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.ARRIVED), 0.3)
    assert beats.silent(9.0) is None
    assert beats.brain.fleet.workers.is_usable("d0", 9.0)


def test_a_worker_that_hangs_does_not_get_work_for_dialling_again() -> None:
    beats = Beats("d0", "d1")
    roster = beats.brain.fleet.workers
    roster.hear("d0", "i1", healthy=True, counts={}, now=0.1, progress=5)
    roster.stall("d0", 0.2)
    beats.brain.register_worker(beats.workers[1], 0.3)
    assert not roster.is_usable("d0", 0.3)
    assert roster.silent_s("d0", 0.3) == pytest.approx(0.2)
