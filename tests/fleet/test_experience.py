"""What is learned of workers, and what outlives them."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.fleet.experience import (
    ENOUGH_HANDOFFS,
    MAX_KINDS,
    MAX_MODELS,
    OUTPUT_TOKENS,
    OWN_AFTER,
    Experience,
    Learned,
    kind_of,
)
from kvrelay.fleet.links import Links
from kvrelay.fleet.rates import Law
from kvrelay.policy.fit import UNKNOWN_ERROR
from kvrelay.policy.perf import Perf
from tests.fleet.values import worker


def slow(perf: Perf) -> Perf:
    return perf.saw_prefill(100, 0, 7.0)


def experience() -> Experience:
    made = Experience(Links())
    made.join(worker("w"))
    return made


def test_a_worker_is_believed_to_be_like_its_kind_until_it_is_seen_often_enough() -> None:
    known = experience()
    known.join(worker("twin"))
    known.join(worker("stranger", weights="other"))
    for _ in range(OWN_AFTER):
        known.saw("w", slow)
    # The twin came before anything was known: it must not look faster, or slower, for never having been tried.
    assert known.perf("twin").prefill_s(100) == pytest.approx(7.0, rel=0.1)
    assert known.perf("stranger").prefill_s(100) < 1.0
    for _ in range(OWN_AFTER):
        known.saw("twin", lambda perf: perf.saw_prefill(100, 0, 1.0))
    assert known.perf("twin").prefill_s(100) == pytest.approx(1.0, rel=0.1)
    assert known.perf("w").prefill_s(100) == pytest.approx(7.0, rel=0.1)


def test_errors_are_those_of_what_is_believed_of_each_worker() -> None:
    known = experience()
    known.join(worker("twin"))
    for _ in range(OWN_AFTER):
        known.saw("w", slow)
    for _ in range(OWN_AFTER - 1):
        known.saw("twin", lambda perf: perf.saw_prefill(100, 0, 1.0))
    errors = {(name, law): error for name, law, error in known.errors()}
    assert errors["w", Law.PREFILL] == known.prefill("w").error()
    assert errors["twin", Law.PREFILL] == known.prefill("twin").error(), "that of its kind"
    assert errors["w", Law.PREFILL] != errors["twin", Law.PREFILL]
    assert errors["w", Law.STEP] == errors["twin", Law.ANSWER] == UNKNOWN_ERROR


def test_who_computes_prompts_of_one_length_alone_knows_from_its_kind_what_others_take() -> None:
    known = experience()
    known.join(worker("twin"))
    for tokens in (10, 100, 1000) * 10:
        known.saw("w", lambda perf, tokens=tokens: perf.saw_prefill(tokens, 0, 0.05 + 0.01 * tokens))  # type: ignore[misc]
    for _ in range(2 * OWN_AFTER):
        known.saw("twin", lambda perf: perf.saw_prefill(10, 0, 0.3))
    assert known.prefill("twin").seen == 2 * OWN_AFTER
    assert known.perf("twin").prefill_s(10) == pytest.approx(0.3, rel=0.1)
    assert known.perf("twin").prefill_s(1000) == pytest.approx(20.0, rel=0.4)


def test_a_restarted_worker_keeps_what_is_known_of_it_unless_it_became_another_kind() -> None:
    known = experience()
    known.saw("w", slow)
    known.join(worker("w", incarnation="i2"))
    assert known.perf("w").prefill.seen == 1
    known.join(worker("w", weights="other"))
    assert known.perf("w").prefill.seen == 0


def test_what_was_learned_is_written_and_read() -> None:
    known = experience()
    known.saw("w", slow)
    known.saw_output("tiny", 50)
    known.handoffs = ENOUGH_HANDOFFS
    again = Experience(Links())
    again.recall(msgspec.json.decode(msgspec.json.encode(known.learned()), type=Learned))
    again.join(worker("w"))
    assert again.perf("w").prefill_s(100) == pytest.approx(known.perf("w").prefill_s(100), rel=0.01)
    assert (again.knows_handoffs, again.output_tokens("tiny", 1000)) == (True, 50)


def test_who_is_not_known_any_more_is_forgotten_and_lessons_about_him_are_dropped() -> None:
    known = experience()
    known.keep_only([])
    known.saw("w", slow)
    with pytest.raises(KeyError):
        known.perf("w")


def test_the_length_of_answers_is_learned_and_max_tokens_bounds_it() -> None:
    known = experience()
    assert (known.output_tokens("tiny", 1000), known.output_tokens("tiny", 16)) == (OUTPUT_TOKENS, 16)
    for _ in range(200):
        known.saw_output("tiny", 40)
    assert known.output_tokens("tiny", 1000) == pytest.approx(40)


def test_what_nobody_of_a_kind_has_shown_is_a_guess_by_the_device() -> None:
    known, engine = experience(), worker("gpu").engine
    assert known.guesses("w", "w") == ("prefill", "answer", "tpot")
    known.saw("w", slow)
    known.join(worker("twin"))
    known.join(msgspec.structs.replace(worker("gpu"), engine=msgspec.structs.replace(engine, device="NVIDIA H100")))
    assert known.guesses("twin", "twin") == ("answer", "tpot")
    assert known.guesses("gpu", "twin") == ("prefill", "answer", "tpot")
    assert known.perf("gpu").prefill_s(10_000) < experience().perf("w").prefill_s(10_000) / 10


def test_the_number_of_kinds_is_bounded() -> None:
    known = experience()
    for number in range(MAX_KINDS + 5):
        known.join(worker("w", weights=str(number)))
    assert len(known.learned().kinds) == MAX_KINDS
    assert kind_of(worker("w", weights="5").engine) in known.learned().kinds


def test_models_whose_answers_are_remembered_are_bounded() -> None:
    known = Experience(Links())
    for number in range(MAX_MODELS + 1):
        known.saw_output(f"m{number}", 7.0)
    assert len(known.learned().output_tokens) == MAX_MODELS
    assert known.output_tokens(f"m{MAX_MODELS}", 1e9) == 7.0


def test_a_lesson_that_cannot_be_learned_does_not_take_the_others_with_it() -> None:
    known = experience()

    def broken(perf: Perf) -> Perf:
        raise ZeroDivisionError

    for learn in (slow, broken, slow):
        known.saw("w", learn)
    with pytest.raises(ZeroDivisionError):
        known.study()
    assert known.prefill("w").seen == 2
