"""What a brain learns from requests: fed with the times of a world with known laws, it predicts that world."""

from __future__ import annotations

import random
import statistics
import weakref

import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import ENOUGH_HANDOFFS, Experience
from kvrelay.fleet.flight import Ask, Plan, PromptLeg
from kvrelay.fleet.lessons import Lessons
from kvrelay.fleet.links import Links
from kvrelay.fleet.loads import Loads, PrefillReservation
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import RequestFacts, Role, Stage
from tests.fleet.values import store, worker

ANSWER_S, STEP_S, LATENCY_S = 0.04, 0.02, 0.015


def prefill_s(tokens: int) -> float:
    return 0.03 + 0.002 * tokens


def fleet(*, local_prefill: bool = True) -> Brain:
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, local_prefill=local_prefill)
    for name in ("s1", "s2"):
        brain.members.register_store(store(name), 0.0)
    brain.register_worker(worker("p", Role.PREFILL, store="s1"), 0.0)
    brain.register_worker(worker("d", Role.DECODE, store="s2"), 0.0)
    return brain


def serve(
    brain: Brain,
    name: str,
    tokens: int,
    now: float,
    *,
    noise: float = 1.0,
    tells: bool = True,
    latency_s: float = LATENCY_S,
    whole: int = 0,
) -> float:
    """One request in that world, alone; its time to the first token. ``whole``: tokens of an answer in one piece."""
    facts = RequestFacts(request_id=name, model="tiny", prompt_tokens=(tokens,), max_tokens=20, page_names=())
    plan = brain.begin(Ask(facts=facts, received_s=now), now)
    assert isinstance(plan, Plan)
    at = now
    if plan.path is Path.LOCAL:
        brain.decode_order(name, at)
        at += noise * prefill_s(tokens)
    else:
        transfer = plan.prefills[0].transfer
        brain.prefill_sent(name, at)
        if tells:
            brain.transfer_event(TransferEvent(store="s1", transfer=transfer, stage=Stage.STARTED), at)
        at += noise * prefill_s(tokens)
        brain.prefill_finished(name, 0, 0, at)
        brain.decode_order(name, at)
        at += noise * latency_s
        if tells:
            brain.transfer_event(TransferEvent(store="s2", transfer=transfer, stage=Stage.LOADED, tokens=tokens), at)
    at += noise * ANSWER_S
    if whole:
        end = at + noise * (whole - 1) * STEP_S
        brain.answered(name, end)
        brain.finish(name, status=200, output_tokens=whole, now=end + 5.0)  # to a slow client
        return at - now
    brain.first_token(name, at)
    brain.finish(name, status=200, output_tokens=20, now=at + noise * 19 * STEP_S)
    return at - now


def errors(brain: Brain, count: int, **more: bool) -> list[float]:
    chance, seen = random.Random(4), []
    for number in range(count):
        first_s = serve(brain, f"r{number}", chance.choice((20, 100, 300)), 100.0 * number, **more)
        option = brain.ledger.get(f"r{number}").predicted  # type: ignore[union-attr]
        assert option is not None
        seen.append(abs(option.ttft_s / first_s - 1))
    return seen


@pytest.mark.parametrize("local_prefill", [True, False])
def test_after_fifty_requests_the_first_token_is_predicted_within_a_tenth(local_prefill: bool) -> None:
    seen = errors(fleet(local_prefill=local_prefill), 60)
    assert seen[0] > 0.3
    assert statistics.median(seen[20:]) < 0.1


def test_it_learns_from_workers_whose_stores_tell_nothing() -> None:
    seen = errors(fleet(local_prefill=False), 60, tells=False)
    assert statistics.median(seen[20:]) < 0.15


def test_the_time_per_token_is_learned() -> None:
    brain = fleet(local_prefill=False)
    errors(brain, 30)
    assert brain.experience.perf("d").step_s(1, 120) == pytest.approx(STEP_S, rel=0.05)


def test_an_answer_in_one_piece_teaches_the_time_per_token_and_one_of_a_single_token_its_first() -> None:
    brain = fleet(local_prefill=False)
    for number in range(20):
        serve(brain, f"many {number}", 100, 100.0 * number, whole=20)
    step_s, few = brain.experience.perf("d").step_s(1, 120), fleet(local_prefill=False)
    assert step_s == pytest.approx(STEP_S, rel=0.1)
    assert brain.experience.guesses("p", "d") == ("answer",)
    for number in range(20):
        serve(few, f"few {number}", 100, 100.0 * number, whole=8)
        serve(brain, f"one {number}", 100, 1e4 + 100.0 * number, whole=1)
    assert brain.experience.answer("d").rates[0] == pytest.approx(ANSWER_S, rel=0.05)
    assert brain.experience.guesses("p", "d") == ()
    assert few.experience.guesses("p", "d") == ("answer", "tpot"), "their first token may be most of their time"


def test_a_single_token_in_one_piece_teaches_what_a_prompt_takes_where_it_is_answered() -> None:
    brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9)
    brain.members.register_store(store("s2"), 0.0)
    brain.register_worker(worker("d", Role.DECODE, store="s2"), 0.0)
    for number in range(30):
        serve(brain, f"one {number}", (20, 100, 300)[number % 3], 100.0 * number, whole=1)
    assert brain.experience.perf("d").prefill_s(300) == pytest.approx(prefill_s(300), rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "latency_s", "reason"),
    [(3, 0.015, "cheaper"), (300, 0.015, ""), (300, 0.9, "cheaper")],
)
def test_a_prompt_stays_on_d_once_hand_offs_are_known_to_cost_more(tokens: int, latency_s: float, reason: str) -> None:
    brain, reasons = fleet(), []
    for number in range(30):
        serve(brain, f"r{number}", tokens, 100.0 * number, latency_s=latency_s)
        reasons.append(brain.ledger.get(f"r{number}").local_reason)  # type: ignore[union-attr]
    assert reasons[:ENOUGH_HANDOFFS] == [""] * ENOUGH_HANDOFFS
    assert reasons[-1] == reason


def test_a_stall_does_not_change_what_is_believed_by_much() -> None:
    brain = fleet(local_prefill=False)
    errors(brain, 40)
    before = brain.experience.perf("p").prefill_s(100)
    serve(brain, "stalled", 100, 1e6, noise=50.0)
    assert brain.experience.perf("p").prefill_s(100) == pytest.approx(before, rel=0.1)


def test_a_lesson_that_nobody_asked_for_yet_does_not_keep_its_request() -> None:
    known = Experience(Links())
    known.join(worker("p"))
    leg = PromptLeg(index=0, prompt_tokens=100, names={}, cached_tokens=20, begun_s=1.0)
    leg.reservation = PrefillReservation(worker="p", key="r/0/0", tokens=80, source="s1", target="s2")
    Lessons(known, Loads()).computed(leg, 3.0)
    kept = weakref.ref(leg)
    del leg
    assert kept() is None
    assert known.prefill("p").seen == 1
