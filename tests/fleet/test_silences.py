"""Workers that say nothing: who counts as lost, and who is waited for."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.errors import Overloaded
from kvrelay.fleet.experience import Learned, kind_of
from kvrelay.fleet.flight import (
    AbandonDecode,
    AbandonPrefill,
    Command,
    DispatchDecode,
    Plan,
    Queued,
    Refuse,
    Rest,
    Start,
)
from kvrelay.policy.fit import start
from kvrelay.policy.loss import LossReason
from kvrelay.protocol.feed import Heartbeat, TransferEvent
from kvrelay.types import Role, Stage
from tests.fleet.beats import Beats, rest
from tests.fleet.known import PERF, ask, member
from tests.fleet.values import begun


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
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=1.9), Plan)
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
        assert isinstance(beats.brain.recovery.lost("r0", rest(), reason=LossReason.SILENT, now=beats.now), Plan)
    assert 1.5 < waits_s[0] < 1.8
    assert 2.0 < waits_s[1] < 2.4


def lost_in_silence(beats: Beats) -> None:
    """``r0`` lost its worker's connection, after 3 s in which this router heard nobody."""
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=3.2), Queued)
    assert list(beats.brain.recovery.turn(3.3)) == []


def test_an_answer_that_nobody_can_write_at_the_moment_goes_on_once_somebody_is_heard() -> None:
    beats = Beats("d0", "d1")
    lost_in_silence(beats)
    beats.steps(3.4)
    (start,) = beats.brain.recovery.turn(3.4)
    assert isinstance(start, Start)
    assert len(beats.brain.recovery) == 0


def test_nobody_waits_for_ever_for_a_worker_that_could_write() -> None:
    beats = Beats("d0", "d1")
    lost_in_silence(beats)
    assert list(beats.brain.recovery.turn(6.1)) == []
    (refuse,) = beats.brain.recovery.turn(9.3)
    assert isinstance(refuse, Refuse)
    assert "no worker is left" in refuse.reason


def refused_in_silence(beats: Beats) -> str:
    """``r0`` lost its D, the name of it, before a word was written, after 3 s in which this router heard nobody."""
    beats.asked()
    beats.steps(0.2)
    lost = beats.decode
    assert isinstance(beats.brain.decode_refused("r0", 3.2, reason=LossReason.RESET), Queued)
    assert list(beats.brain.recovery.turn(3.3)) == []
    return lost


def test_a_request_that_nobody_can_answer_at_the_moment_is_answered_once_somebody_is_heard() -> None:
    beats = Beats("d0", "d1")
    lost = refused_in_silence(beats)
    told = beats.brain.request_statuses.of("r0", None, 3.3)
    assert (told.waits_for, told.begun) == ("writer", False)
    beats.steps(3.4)
    assert list(beats.brain.recovery.turn(3.4)) == [DispatchDecode(request_id="r0")]
    assert (beats.decode == lost, len(beats.brain.recovery)) == (False, 0)
    beats.brain.first_token("r0", 3.5)
    beats.brain.check_invariants()


def test_no_request_waits_for_ever_for_a_worker_that_could_answer_it() -> None:
    beats = Beats("d0", "d1")
    refused_in_silence(beats)
    assert list(beats.brain.recovery.turn(6.1)) == []
    (refuse,) = beats.brain.recovery.turn(9.3)
    assert isinstance(refuse, Refuse)
    assert "no worker could answer" in refuse.reason
    beats.brain.finish("r0", status=503, output_tokens=0, now=9.3)
    beats.brain.check_invariants()


def test_a_client_that_hangs_up_while_nobody_can_answer_leaves_nothing_behind() -> None:
    beats = Beats("d0", "d1")
    refused_in_silence(beats)
    beats.brain.finish("r0", status=499, output_tokens=0, now=4.0)
    assert len(beats.brain.recovery) == 0
    beats.brain.check_invariants()


def test_answers_that_wait_for_their_turn_outlive_a_moment_in_which_nobody_is_heard() -> None:
    beats = Beats("d0", "d1", known=True)
    recovery, names = beats.brain.recovery, [f"r{number}" for number in range(80)]
    for number, name in enumerate(names):
        begun(beats.brain, ask(name, (number, 500)))
        beats.brain.first_token(name, 0.1)
    beats.steps(0.2)
    names = [name for name in names if recovery.decode_worker(name) == "d0"]
    started: list[Command | Plan] = []
    for number, name in enumerate(names):
        plan = recovery.lost(name, Rest(ask=ask(name, (100 + number, 500)), tokens=1), reason=LossReason.RESET, now=0.2)
        started += [plan] if isinstance(plan, Plan) else []
    while beats.now < 7.0:
        beats.steps(beats.now + 0.2)
        started += recovery.turn(beats.now)
    assert len(recovery) >= 3, "they have waited longer for their turn than anybody does for a worker"
    for tenth in range(100, 130):
        assert list(recovery.turn(tenth / 10)) == []
    told = beats.brain.request_statuses.of(next(name for name in names if recovery.waiting(name)), None, 12.9)
    assert (told.waits_for, told.given_up_s) == ("writer", recovery.leave_s)
    while beats.now < 30.0:
        beats.steps(max(13.0, beats.now + 0.2))
        started += recovery.turn(beats.now)
    assert len(started) == len(names)
    assert not any(isinstance(command, Refuse) for command in started)


@pytest.mark.parametrize(
    ("gap_s", "left_s"), [(1.0, 8.0), (10.0, 30.0)], ids=["eight of its own words", "and no longer than the limit"]
)
def test_an_answer_that_came_slowly_is_waited_for_by_its_own_pace(gap_s: float, left_s: float) -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    lost = beats.decode
    beats.steps(0.2)
    commands: list[Command] = []
    while not commands and beats.now < 60.0:
        beats.steps(beats.now + 0.1, hangs=lost)
        commands = beats.brain.silences.unanswered("r0", 0.1, beats.now, gap_s)
    assert commands == [AbandonDecode(request_id="r0", reason=LossReason.SILENT)]
    assert left_s < beats.now < left_s + 0.4


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
    assert commands == [AbandonDecode(request_id="r0", reason=LossReason.SILENT)]
    assert beats.now - 0.2 < 1.8


def test_a_stream_is_waited_for_as_long_as_the_batch_that_many_have_joined_is_predicted_to_take() -> None:
    beats = Beats("d0", "d1")
    slow = msgspec.structs.replace(PERF, step=start(0.01, 6e-3, 1e-9))
    beats.brain.experience.recall(Learned(kinds={kind_of(member("any", Role.DECODE).engine): slow}, handoffs=0))
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    lost = beats.decode
    for number in range(1, 121):
        begun(beats.brain, ask(f"r{number}", (8, 16)), 0.1)
    assert beats.brain.silences.step_s(lost, 0.1) > 0.3, "60 more are written there"
    beats.steps(0.2)
    while beats.now < 1.9:
        assert beats.brain.silences.unanswered("r0", 0.2, beats.now, 0.03) == []
        beats.steps(beats.now + 0.1, hangs=lost)
    while not beats.brain.silences.unanswered("r0", 0.2, beats.now, 0.03):
        beats.steps(beats.now + 0.1, hangs=lost)
    assert 2.4 < beats.now < 4.0


def test_a_stream_that_hangs_does_not_tell_its_old_pace_for_ever() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    while beats.now < 15.0:
        beats.brain.silences.unanswered("r0", 0.1, beats.now, 5.0)
        beats.steps(beats.now + 0.2)
    assert beats.brain.silences.silence_s(beats.decode, beats.now) == 1.5


def test_an_answer_that_its_busy_worker_has_forgotten_is_not_waited_for_much_longer_however_slowly_it_came() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    while not beats.brain.silences.unanswered("r0", 0.1, beats.now, 10.0):
        beats.steps(beats.now + 0.5)
    assert 30.0 < beats.now < 31.0


def test_an_answer_that_its_busy_worker_has_forgotten_goes_on_elsewhere() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    commands: list[Command] = []
    while not commands and beats.now < 60.0:
        beats.steps(beats.now + 0.5)
        commands = beats.brain.silences.unanswered("r0", 0.1, beats.now)
    assert commands == [AbandonDecode(request_id="r0", reason=LossReason.FORGOTTEN)]
    assert 30.0 < beats.now < 31.0
    assert beats.brain.silences.stalls == 0, "its worker works"


def moved(beats: Beats) -> str:
    """``r0`` goes on at a second worker, its name, which has not written a word of it."""
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason=LossReason.RESET, now=0.2), Plan)
    return beats.decode


@pytest.mark.parametrize("others", [(), ("d2",)], ids=["the first one is well again", "there is a third one"])
def test_a_moved_answer_that_its_busy_worker_has_forgotten_goes_on_elsewhere(others: tuple[str, ...]) -> None:
    beats = Beats("d0", "d1", *others)
    second = moved(beats)
    commands: list[Command] = []
    while not commands and beats.now < 200.0:
        beats.steps(beats.now + 0.5)
        commands = beats.brain.silences.unanswered("r0", 0.2, beats.now)
    assert commands == [AbandonDecode(request_id="r0", reason=LossReason.FORGOTTEN)]
    assert 60.0 < beats.now < 61.0, "it may have queued"
    assert isinstance(beats.brain.recovery.lost("r0", rest(), reason=LossReason.FORGOTTEN, now=beats.now), Plan)
    assert beats.decode != second
    beats.brain.check_invariants()


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


def left_s(beats: Beats, since_s: float, reason: LossReason, hangs: str = "") -> float:
    """When ``r0``, which hears nothing of its D since then, leaves it for this reason."""
    commands: list[Command] = []
    while not commands and beats.now < since_s + 300.0:
        beats.steps(beats.now + 0.5, hangs=hangs)
        commands = beats.brain.silences.unanswered("r0", since_s, beats.now)
    assert commands == [AbandonDecode(request_id="r0", reason=reason)]
    return beats.now


def test_the_only_d_is_not_waited_for_for_ever_when_its_engine_hangs() -> None:
    beats = Beats("d0")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    assert 30.0 < left_s(beats, 0.2, LossReason.SILENT, hangs="d0") < 31.5
    with pytest.raises(Overloaded, match="no worker is left"):
        beats.brain.recovery.lost("r0", rest(), reason=LossReason.SILENT, now=beats.now)


def test_the_only_d_is_waited_for_longer_as_long_as_it_works() -> None:
    beats = Beats("d0")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    assert 120.0 < left_s(beats, 0.2, LossReason.FORGOTTEN) < 121.0


@pytest.mark.parametrize("in_one_piece", [False, True])
def test_an_answer_that_its_busy_worker_has_forgotten_before_the_first_word_is_asked_of_another_one(
    in_one_piece: bool,
) -> None:
    beats = Beats("d0", "d1", known=True)
    transfer = beats.asked(in_one_piece=in_one_piece)
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    beats.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.ARRIVED), 0.3)
    first = beats.decode
    left = left_s(beats, 0.1, LossReason.FORGOTTEN)
    assert 30.0 < left < 40.0
    again = beats.brain.decode_refused("r0", left, reason=LossReason.FORGOTTEN)
    assert isinstance(again, DispatchDecode)
    assert beats.decode != first
    assert len(beats.brain.outcomes.breakers) == 0, "it is not to blame"
    beats.brain.check_invariants()


def test_an_answer_that_is_forgotten_again_and_again_waits_longer_each_time() -> None:
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    waits_s = []
    for _ in range(4):
        since_s = beats.now
        beats.brain.decode_order("r0", since_s)
        waits_s.append(left_s(beats, since_s, LossReason.FORGOTTEN) - since_s)
        assert isinstance(beats.brain.recovery.lost("r0", rest(), reason=LossReason.FORGOTTEN, now=beats.now), Plan)
    assert waits_s == pytest.approx([30.0, 60.0, 120.0, 120.0], abs=1.0)


def test_a_request_that_is_forgotten_before_the_first_word_waits_longer_each_time_and_not_for_ever() -> None:
    beats = Beats("d0", "d1", known=True)
    transfer = beats.asked()
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    beats.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.ARRIVED), 0.3)
    waits_s: list[float] = []
    while len(waits_s) < 20:
        since_s = beats.now
        beats.brain.decode_order("r0", since_s)
        waits_s.append(left_s(beats, since_s, LossReason.FORGOTTEN) - since_s)
        if beats.brain.decode_refused("r0", beats.now, reason=LossReason.FORGOTTEN) is None:
            break
    due_s = waits_s[0] - 30.0
    assert waits_s == pytest.approx([each + due_s for each in (30.0, 60.0, *[120.0] * 7)], abs=1.0)
    beats.brain.check_invariants()


def test_a_request_that_was_forgotten_is_not_doubted_once_its_answer_comes() -> None:
    beats = Beats("d0", "d1", known=True)
    transfer = beats.asked()
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    beats.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.ARRIVED), 0.3)
    left_s(beats, 0.1, LossReason.FORGOTTEN)
    beats.brain.decode_refused("r0", beats.now, reason=LossReason.FORGOTTEN)
    beats.brain.decode_order("r0", beats.now)
    beats.brain.first_token("r0", beats.now)
    since_s = beats.now
    assert left_s(beats, since_s, LossReason.FORGOTTEN) - since_s == pytest.approx(30.0, abs=1.0)


def test_an_answer_in_one_piece_is_waited_for_as_long_as_it_is_predicted_to_take() -> None:
    beats = Beats("d0", "d1", known=True)
    longer = ask("r0", (7, 1000))
    facts = msgspec.structs.replace(longer.facts, max_tokens=4000)
    transfer = beats.asked(in_one_piece=True, facts=facts)
    beats.brain.prefill_finished("r0", 0, 0, 0.2)
    beats.brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.ARRIVED), 0.3)
    assert 190.0 < left_s(beats, 0.1, LossReason.FORGOTTEN) < 220.0, "4,000 steps of 10 ms, and some patience"


def prompts(*lengths: int) -> Beats:
    """The P of a fleet has prompts of these ``lengths`` in tokens, sent one after the other."""
    beats = Beats("d0", known=True)
    for number, length in enumerate(lengths):
        begun(beats.brain, ask(f"r{number}", (7 + number, length)))
        beats.brain.prefill_sent(f"r{number}", 0.0)
    return beats


def started(beats: Beats, request_id: str) -> None:
    """P says that it has begun to compute its prompt."""
    event = TransferEvent(store="s1", transfer=f"{request_id}/0/0", stage=Stage.STARTED)
    beats.brain.transfer_event(event, beats.now)


def forgotten(beats: Beats, until_s: float) -> list[Command]:
    """P makes progress, and says nothing of any prompt: those that are computed elsewhere."""
    commands: list[Command] = []
    while not commands and beats.now < until_s:
        beats.steps(beats.now + 0.5)
        commands = list(beats.brain.silences.silent_prefills(beats.now))
    assert beats.brain.silences.stalls == 0, "its worker works"
    return commands


def test_a_prompt_that_its_busy_prefill_worker_has_never_begun_is_computed_elsewhere() -> None:
    beats = prompts(1000, 1000)
    started(beats, "r1")
    assert forgotten(beats, 200.0) == [AbandonPrefill(request_id="r0", index=0)]
    assert 30.0 < beats.now < 40.0, "it takes a second"


@pytest.mark.parametrize("begins", [False, True], ids=["not begun", "begun"])
def test_the_only_prompt_of_a_prefill_worker_is_what_it_is_busy_with_however_long_it_takes(begins: bool) -> None:
    beats = prompts(1000)
    if begins:
        started(beats, "r0")
    assert forgotten(beats, 400.0) == []


@pytest.mark.parametrize(("later_tokens", "is_forgotten"), [(1000, True), (100, False)], ids=["as long", "shorter"])
def test_a_prompt_that_was_begun_is_forgotten_when_a_later_one_that_is_no_shorter_is_done(
    later_tokens: int, is_forgotten: bool
) -> None:
    """Long ones stand back for shorter ones."""
    beats = prompts(1000, later_tokens, 1000)
    started(beats, "r0")
    started(beats, "r1")
    beats.brain.prefill_finished("r1", 0, 0, 1.0)
    started(beats, "r2")
    assert forgotten(beats, 100.0) == ([AbandonPrefill(request_id="r0", index=0)] if is_forgotten else [])


def test_a_worker_that_hangs_does_not_get_work_for_dialling_again() -> None:
    beats = Beats("d0", "d1")
    roster = beats.brain.fleet.workers
    roster.hear("d0", "i1", healthy=True, counts={}, now=0.1, progress=5)
    roster.stall("d0", 0.2)
    beats.brain.register_worker(beats.workers[1], 0.3)
    assert not roster.is_usable("d0", 0.3)
    assert roster.silent_s("d0", 0.3) == pytest.approx(0.2)


@pytest.mark.parametrize(("gap_s", "leaves"), [(0.05, True), (0.0, False)])
def test_a_stream_that_flowed_leaves_an_api_server_that_hangs_before_its_lease_is_over(
    gap_s: float, leaves: bool
) -> None:
    """Its engine steps on. Who had no word yet may only queue at a busy one."""
    beats = Beats("d0", "d1")
    beats.asked()
    beats.brain.first_token("r0", 0.1)
    beats.steps(0.2)
    hangs = beats.decode
    for now in (1.0, 2.0, 3.3):
        well = now < 3.0
        for info in beats.workers:
            healthy, progress = well or info.name != hangs, round(now * 1000)
            beat = Heartbeat(name=info.name, incarnation="i1", healthy=healthy, counts={}, progress=progress)
            beats.brain.members.heartbeat(info, beat, now)
        commands = beats.brain.silences.unanswered("r0", 0.2, now, gap_s=gap_s)
        assert commands == ([AbandonDecode(request_id="r0", reason=LossReason.SILENT)] if leaves and not well else [])
