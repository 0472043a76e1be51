"""Requests that are predicted to miss their promise, one after the other in an idle cluster."""

from __future__ import annotations

import pytest

from kvrelay.errors import Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Plan
from kvrelay.fleet.trials import MAX_MODELS, TRY_EVERY_S, Trials
from kvrelay.policy.admit import Limits, Turned
from tests.fleet.test_door import ask, known


def gets_in(brain: Brain, name: str, now: float, ttft_s: float = 0.5) -> bool:
    """Of 100 tokens, for which ten seconds are predicted."""
    try:
        return isinstance(brain.begin(ask(name, now=now, ttft_s=ttft_s), now), Plan)
    except Overloaded:
        return False


def end(brain: Brain, name: str, now: float, first_s: float) -> None:
    """The first token of ``name``, which began at ``now``, came after ``first_s``, and that was all."""
    brain.first_token(name, now + first_s)
    brain.finish(name, status=200, output_tokens=1, now=now + first_s)


def after_a_refusal() -> Brain:
    brain = known(Limits())
    assert not gets_in(brain, "first", 0.0)
    return brain


def test_an_idle_cluster_refuses_what_would_miss_its_promise_and_lets_the_patient_in() -> None:
    brain = after_a_refusal()
    assert not any(gets_in(brain, f"late {number}", number / 10) for number in range(60))
    assert brain.door.refused == {"ttft": 61}
    assert gets_in(brain, "patient", 7.0, ttft_s=600.0)


def test_now_and_then_one_is_let_in_to_show_whether_the_predictions_hold() -> None:
    brain = after_a_refusal()
    for due_s in (TRY_EVERY_S, 2 * TRY_EVERY_S):
        assert not gets_in(brain, f"early {due_s}", due_s - 0.1)
        assert gets_in(brain, f"trial {due_s}", due_s)
        end(brain, f"trial {due_s}", due_s, first_s=0.6)
        assert not gets_in(brain, f"late {due_s}", due_s + 1.0)
    timeline = brain.ledger.get(f"trial {TRY_EVERY_S}")
    assert timeline is not None
    assert timeline.report()["promise"] == {"ttft_s": 0.5, "despite": "trial"}


def test_who_is_not_alone_is_no_trial() -> None:
    brain = after_a_refusal()
    assert gets_in(brain, "patient", TRY_EVERY_S, ttft_s=600.0)
    assert not gets_in(brain, "late", TRY_EVERY_S)


def test_a_trial_that_keeps_its_promise_is_followed_by_the_next_at_once() -> None:
    brain, now = after_a_refusal(), TRY_EVERY_S
    for number in range(5):
        assert gets_in(brain, f"trial {number}", now)
        end(brain, f"trial {number}", now, first_s=0.4)
        now += 1.0
    assert gets_in(brain, "last", now)
    end(brain, "last", now, first_s=9.0)
    assert not gets_in(brain, "late", now + 9.1)


def test_steps_that_nobody_measured_refuse_nobody() -> None:
    brain = known(Limits())
    assert isinstance(brain.begin(ask("guessed", tpot_s=1e-9), 0.0), Plan)
    timeline = brain.ledger.get("guessed")
    assert timeline is not None
    assert timeline.report()["promise"] == {"tpot_s": 1e-9, "despite": "guess"}
    brain.finish("guessed", status=499, output_tokens=0, now=0.0)
    for _ in range(8):
        brain.experience.saw("decode-1", lambda perf: perf.saw_step(1, 100, 0.1))
    with pytest.raises(Overloaded, match="next token is predicted"):
        brain.begin(ask("known", tpot_s=0.05), 0.0)


def test_models_that_come_and_go_do_not_pile_up() -> None:
    trials = Trials()
    for number in range(3 * MAX_MODELS):
        trials.judged(f"model {number}", Turned(reason="late", kind="ttft"), float(number))
    assert len(repr(trials).split(", ")) <= MAX_MODELS
