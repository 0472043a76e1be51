"""Requests whose workers die, one after the other: how many they may take with them."""

from __future__ import annotations

import pytest

from kvrelay.errors import Harmful
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Condemn, Plan, Rest, SendPrefill
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


def killed(brain: Brain, name: str, now: float, reason: str = "reset") -> bool:
    """Its D dies and it goes to another one; False: it does not."""
    beat(brain, asked(brain, name, now), now + 0.1)
    try:
        return brain.decode_refused(name, now + 2.0, reason=reason)
    except Harmful:
        return False


def deaths(brain: Brain, name: str, reason: str = "reset") -> int:
    """How many workers die before the request is stopped or none is left."""
    count = 1
    while killed(brain, name, 10.0 * count, reason):
        count += 1
    return count


@pytest.mark.parametrize("reason", ["reset", "failed", "silent"])
def test_a_request_that_is_alone_takes_two_workers_and_no_more(reason: str) -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", reason) == 2
    assert brain.suspects.ended == 1
    brain.check_invariants()


def test_where_all_workers_answer_that_they_failed_nobody_says_that_it_is_the_request() -> None:
    brain = known_brain([], DECODES[:2])
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", "failed") == 2
    assert brain.suspects.ended == 0


def test_workers_that_were_silent_before_they_were_asked_are_held_against_nobody() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    for number in range(1, len(DECODES)):
        asked(brain, "r0", 10.0 * number)
        assert brain.decode_refused("r0", 10.0 * number + 2.0, reason="silent")
    assert brain.suspects.ended == 0


@pytest.mark.parametrize("reason", ["unasked", "gone", ""])
def test_workers_that_were_not_reached_or_left_are_held_against_nobody(reason: str) -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    assert deaths(brain, "r0", reason) == len(DECODES)
    assert brain.suspects.ended == 0


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
        assert brain.decode_refused(f"r{number}", 0.1, reason="reset")
    shares = [flight.blame.share for flight in brain._flights.values()]
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
        assert isinstance(brain.recovery.lost("r0", rest("r0"), reason="reset", now=now), Plan), "it had written"
        asked(brain, "r0", now)
        assert isinstance(brain.recovery.lost("r0", rest("r0"), reason="silent", now=now + 6), Plan), "one, by chance"
        asked(brain, "r0", now + 7)
        brain.recovery.resumed("r0", 0.1, now + 8)
    assert brain.suspects.ended == 0
    brain.check_invariants()


def test_a_rest_that_kills_two_workers_before_a_word_of_it_is_stopped() -> None:
    brain = known_brain([], DECODES)
    begun(brain, ask("r0", (7, 200)))
    asked(brain, "r0")
    brain.first_token("r0", 0.1)
    for number in range(2):
        assert isinstance(brain.recovery.lost("r0", rest("r0"), reason="reset", now=10.0 * number), Plan)
        asked(brain, "r0", 10.0 * number)
    with pytest.raises(Harmful, match="2 workers in a row"):
        brain.recovery.lost("r0", rest("r0"), reason="reset", now=30.0)
    timeline = brain.finish("r0", status=502, output_tokens=40, now=30.0)
    assert [each.outcome for each in timeline.resumptions][-1] == "failed"
    assert (brain.in_flight, brain.suspects.ended) == (0, 1)
    brain.check_invariants()


def test_a_prompt_that_kills_two_prefill_workers_reaches_no_third_and_no_d() -> None:
    brain = known_brain([(f"p{number}", "s1") for number in range(4)], DECODES[:2])
    begun(brain, ask("r0", (7, 2000)))
    (again,) = brain.prefill_failed("r0", 0, 1.0, died=True)
    assert isinstance(again, SendPrefill)
    (command,) = brain.prefill_failed("r0", 0, 10.0, died=True)
    assert isinstance(command, Condemn)
    assert "2 workers in a row" in command.reason
    assert brain.suspects.ended == 1
    brain.check_invariants()
