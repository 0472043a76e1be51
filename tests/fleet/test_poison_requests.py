"""Requests whose workers die, one after the other: how many they may take with them."""

from __future__ import annotations

import pytest

from kvrelay.errors import Harmful, Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Plan, Refuse, RejectPoison, Rest, SendPrefill
from kvrelay.policy.loss import LossReason
from kvrelay.types import Role
from tests.fleet.known import ask, known_brain, member
from tests.fleet.values import begun

DECODES = [(f"d{number}", "s1") for number in range(9)]
WRITTEN = (9, 40)


def asked(brain: Brain, name: str, now: float = 0.0) -> str:
    """The D that has the request now."""
    return brain.decode_order(name, now).worker


def beat(brain: Brain, worker: str, now: float) -> None:
    """It says that it lives."""
    brain.fleet.workers.hear(worker, "i1", healthy=True, counts={}, now=now)


def killed(brain: Brain, name: str, now: float, reason: LossReason = LossReason.RESET, after_s: float = 2.0) -> bool:
    """Its D dies and it goes to another one; False: it does not."""
    worker = asked(brain, name, now)
    beat(brain, worker, now + 0.1)
    if reason is LossReason.FAILED:
        brain.fleet.workers.leave(worker, "i1")
    try:
        return brain.decode_refused(name, now + after_s, reason=reason) is not None
    except (Harmful, Overloaded):
        return False


def deaths(brain: Brain, name: str, reason: LossReason = LossReason.RESET, after_s: float = 2.0) -> int:
    """How many workers die before the request is stopped or none is left."""
    count = 1
    while killed(brain, name, 100.0 * count, reason, after_s):
        count += 1
    return count


@pytest.mark.parametrize("reason", [LossReason.RESET, LossReason.FAILED, LossReason.SILENT])
def test_a_request_that_is_alone_takes_two_workers_and_no_more(reason: LossReason) -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", reason) == 2
    assert brain.poison_requests.ended == 1
    brain.check_invariants()


def test_a_long_answer_in_one_piece_outlives_many_deaths_by_chance() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", LossReason.RESET, after_s=60.0) == 8
    assert brain.poison_requests.ended == 1, "whoever sends it again would kill eight more"


def test_how_long_a_worker_worked_before_it_stood_still_is_what_tells_of_chance() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", LossReason.SILENT, after_s=40.0) == 2, "it stood still at once, and was waited for"


def test_where_other_routers_have_requests_nobody_is_held_to_be_alone() -> None:
    brain = known_brain([], DECODES, knows_all=False)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0") == 5


def failed(brain: Brain, name: str, now: float) -> bool:
    """Its D answers that it failed, and lives; whether it goes to another one. Raises ``Overloaded``."""
    asked(brain, name, now)
    return brain.decode_refused(name, now + 0.1, reason=LossReason.FAILED) is not None


def test_where_workers_answer_that_they_failed_and_live_its_client_may_ask_again() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert failed(brain, "r0", 0.0)
    with pytest.raises(Overloaded, match="retry"):
        failed(brain, "r0", 1.0)
    assert brain.poison_requests.ended == 0


def test_one_worker_that_failed_and_lives_does_not_excuse_seven_that_died_late() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert failed(brain, "r0", 0.0)
    assert deaths(brain, "r0", LossReason.RESET, after_s=60.0) == 7
    assert brain.poison_requests.ended == 1


def test_workers_that_fail_at_everything_do_not_keep_a_request_from_one_that_is_well() -> None:
    brain = known_brain([], DECODES[:2])
    for name in ("d0", "d1"):
        brain.outcomes.breakers.failed(name, "x", 0.0)
    begun(brain, ask("r0", (7, 200)), 1.0)
    assert failed(brain, "r0", 1.0)
    brain.register_worker(member("d2", Role.DECODE), 2.0)
    assert failed(brain, "r0", 2.0)
    assert asked(brain, "r0", 3.0) == "d2"


def test_a_prompt_at_which_prefill_workers_fail_that_live_may_be_sent_again() -> None:
    brain = known_brain([(f"p{number}", "s1") for number in range(4)], DECODES[:2])
    begun(brain, ask("r0", (7, 2000)))
    (again,) = brain.prefill_failed("r0", 0, 1.0, reason=LossReason.FAILED)
    assert isinstance(again, SendPrefill)
    (command,) = brain.prefill_failed("r0", 0, 2.0, reason=LossReason.FAILED)
    assert isinstance(command, Refuse)
    assert (command.after_s, brain.poison_requests.ended) == (1.0, 0)
    brain.check_invariants()


def test_workers_that_were_silent_before_they_were_asked_are_held_against_nobody() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    for number in range(1, len(DECODES)):
        asked(brain, "r0", 10.0 * number)
        assert brain.decode_refused("r0", 10.0 * number + 2.0, reason=LossReason.SILENT)
    assert brain.poison_requests.ended == 0


@pytest.mark.parametrize("reason", [LossReason.UNASKED, LossReason.GONE, LossReason.GAVE_UP])
def test_workers_that_were_not_reached_or_left_are_held_against_nobody(reason: LossReason) -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", reason) == len(DECODES)
    assert brain.poison_requests.ended == 0


def test_among_many_others_a_request_outlives_four_workers_and_no_more() -> None:
    brain = known_brain([], DECODES)
    for number in range(90):
        begun(brain, ask(f"r{number}", (number, 200)))
        asked(brain, f"r{number}")
    assert deaths(brain, "r0") == 5


def test_all_that_a_worker_had_share_its_death_whoever_tells_of_it_last() -> None:
    brain = known_brain([], DECODES[:1])
    for number in range(4):
        begun(brain, ask(f"r{number}", (number, 200)))
        asked(brain, f"r{number}")
    for worker in ("d1", "d2"):
        brain.register_worker(member(worker, Role.DECODE), 0.0)
    for number in range(4):
        assert brain.decode_refused(f"r{number}", 0.1, reason=LossReason.RESET)
    shares = [flight.crashes.share for flight in brain._flights.values()]
    assert shares == [0.25] * 4


def rest(name: str) -> Rest:
    return Rest(ask=ask(name, (7, 200), WRITTEN), tokens=40)


def test_an_answer_that_goes_on_is_held_to_nothing_that_was_before() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert killed(brain, "r0", 1.0)
    asked(brain, "r0", 2.0)
    brain.first_token("r0", 2.0)
    for number in range(1, 5):
        now = 10.0 * number
        assert isinstance(brain.recovery.lost("r0", rest("r0"), reason=LossReason.RESET, now=now), Plan), (
            "it had written"
        )
        asked(brain, "r0", now)
        assert isinstance(brain.recovery.lost("r0", rest("r0"), reason=LossReason.SILENT, now=now + 6), Plan), (
            "one, by chance"
        )
        asked(brain, "r0", now + 7)
        brain.recovery.resumed("r0", 0.1, now + 8)
    assert brain.poison_requests.ended == 0
    brain.check_invariants()


def test_a_rest_that_kills_two_workers_before_a_word_of_it_is_stopped() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    asked(brain, "r0")
    brain.first_token("r0", 0.1)
    for number in range(2):
        assert isinstance(brain.recovery.lost("r0", rest("r0"), reason=LossReason.RESET, now=10.0 * number), Plan)
        asked(brain, "r0", 10.0 * number)
    with pytest.raises(Harmful, match="2 workers in a row"):
        brain.recovery.lost("r0", rest("r0"), reason=LossReason.RESET, now=12.0)
    timeline = brain.finish("r0", status=502, output_tokens=40, now=12.0)
    assert [each.outcome for each in timeline.resumptions][-1] == "failed"
    assert (brain.in_flight, brain.poison_requests.ended) == (0, 1)
    brain.check_invariants()


def test_a_prompt_that_kills_two_prefill_workers_reaches_no_third_and_no_d() -> None:
    brain = known_brain([(f"p{number}", "s1") for number in range(4)], DECODES[:2])
    begun(brain, ask("r0", (7, 2000)))
    (again,) = brain.prefill_failed("r0", 0, 1.0, reason=LossReason.RESET)
    assert isinstance(again, SendPrefill)
    (command,) = brain.prefill_failed("r0", 0, 10.0, reason=LossReason.RESET)
    assert isinstance(command, RejectPoison)
    assert "2 workers in a row" in command.reason
    assert brain.poison_requests.ended == 1
    brain.check_invariants()
