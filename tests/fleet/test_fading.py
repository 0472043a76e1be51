"""A worker that was slow for a while gets work again, and one that is slow gets little, however light the load is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.experience import OWN_AFTER, Experience
from kvrelay.fleet.fading import FADE_AFTER_S, LONGEST_FADE_S, LOOK_EVERY_S
from kvrelay.fleet.flight import Ask, Plan
from kvrelay.fleet.links import Links
from kvrelay.fleet.rates import Law
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import RequestFacts, Role, Stage
from tests.fleet.values import store, worker

PREFILL_S, ANSWER_S, STEP_S = 0.05, 0.010, 0.010
HUNG_S = 0.003
"""What is left of a pause once outliers are cut off, as an answer's delay."""


class World:
    """One request a second, and two decode workers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9, local_prefill=False)
        for name in ("sp", "sd"):
            self.brain.members.register_store(store(name), 0.0)
        self.brain.register_worker(worker("p", Role.PREFILL, store="sp"), 0.0)
        for name in ("d1", "d2"):
            self.brain.register_worker(worker(name, Role.DECODE, store="sd"), 0.0)
        self.slow: dict[str, float] = {}
        """Seconds by which answers of a worker begin later."""
        self.step_s: dict[str, float] = {}
        """Between tokens, of workers that are not like others."""

    def serve(self, seconds: int) -> Counter[str]:
        """Who answered how often."""
        chosen: Counter[str] = Counter()
        for _ in range(seconds):
            self.now += 1.0
            self.brain.tick(self.now)
            chosen[self._ask(f"r{self.now}")] += 1
        return chosen

    def burst(self, requests: int) -> Counter[str]:
        """Who is to answer how many that come at once."""
        self.now += 1.0
        self.brain.tick(self.now)
        names = [f"b{self.now}-{number}" for number in range(requests)]
        for name in names:
            self._begin(name)
        return Counter(self.brain._flights[name].decode.worker for name in names)

    def _begin(self, name: str) -> Plan:
        facts = RequestFacts(request_id=name, model="tiny", prompt_tokens=(100,), max_tokens=20, page_names=())
        plan = self.brain.begin(Ask(facts=facts, received_s=self.now), self.now)
        assert isinstance(plan, Plan)
        return plan

    def _ask(self, name: str) -> str:
        brain, at, plan = self.brain, self.now, self._begin(name)
        transfer = plan.prefills[0].transfer
        brain.prefill_sent(name, at)
        at += PREFILL_S
        brain.prefill_finished(name, 0, 0, at)
        for stage in (Stage.ARRIVED, Stage.LOADED):
            brain.transfer_event(TransferEvent(store="sd", transfer=transfer, stage=stage), at)
        decode = brain.decode_order(name, at).worker
        at += ANSWER_S + self.slow.get(decode, 0.0)
        brain.first_token(name, at)
        brain.finish(name, status=200, output_tokens=20, now=at + 19 * self.step_s.get(decode, STEP_S))
        return decode


def test_a_worker_that_was_held_up_for_a_while_gets_its_share_again_soon_after() -> None:
    world = World()
    assert min(world.serve(40).values()) >= 15
    world.slow = {"d1": HUNG_S}
    world.serve(15)
    assert world.serve(10) == {"d2": 10}, "who has the choice leaves the slow one alone"
    world.slow = {}
    world.serve(round(FADE_AFTER_S + 2 * LOOK_EVERY_S))
    assert world.serve(40)["d1"] >= 10


@pytest.mark.parametrize("slow_s", [0.003, 0.1, 5.0])
def test_a_worker_that_stays_slow_is_tried_more_and_more_seldom(slow_s: float) -> None:
    world = World()
    world.serve(40)
    world.slow = {"d1": slow_s}
    world.serve(60)
    assert 1 <= world.serve(240)["d1"] <= 4
    assert 1 <= world.serve(960)["d1"] <= 3


def test_a_worker_that_is_tried_gets_one_request_of_a_burst_before_anything_is_seen_of_it() -> None:
    world = World()
    world.serve(40)
    world.step_s = {"d1": 10 * STEP_S}
    world.serve(60)
    for idle_s in (LOOK_EVERY_S, LONGEST_FADE_S):
        world.now += idle_s
        world.brain.tick(world.now)
    assert 1 <= world.burst(10)["d1"] <= 2


def test_a_trial_of_which_nothing_is_heard_is_repeated(known: Experience) -> None:
    now = FADE_AFTER_S + LOOK_EVERY_S
    for _ in range(2):
        known.fade(now)
        assert believed(known, "slow") == pytest.approx(0.010, rel=0.01)
        known.sent("slow", [Law.ANSWER])
        assert believed(known, "slow") == pytest.approx(0.02, rel=0.05)
        now += FADE_AFTER_S + LOOK_EVERY_S


@pytest.mark.parametrize(("seen_s", "after_s"), [(0.0101, 0.010), (0.02, 0.02), (0.03, 0.02)])
def test_what_comes_of_a_trial_decides_though_it_is_seen_late(known: Experience, seen_s: float, after_s: float) -> None:
    known.fade(FADE_AFTER_S + LOOK_EVERY_S)
    known.sent("slow", [Law.ANSWER])
    known.fade(FADE_AFTER_S + 3 * LOOK_EVERY_S)
    answers(known, "slow", seen_s)
    assert believed(known, "slow") == pytest.approx(after_s, rel=0.1)


# ---------------------------------------------------------------- what is believed


def answers(experience: Experience, name: str, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        experience.saw(name, lambda perf: perf.saw_answer(seconds))


@pytest.fixture
def known() -> Experience:
    """Three of a kind, of which one is slower."""
    made = Experience(Links())
    for name in ("a", "b", "slow"):
        made.join(worker(name))
    for name, seconds in (("a", 0.010), ("b", 0.0101), ("slow", 0.02)):
        answers(made, name, seconds, 2 * OWN_AFTER)
    made.fade(0.0)
    return made


def believed(known: Experience, name: str) -> float:
    (rate,) = known.rates(Law.ANSWER, (name,))
    assert rate == known.answer(name).rates
    return rate[0]


def test_what_is_believed_fades_once_it_is_old_and_only_if_it_is_bad(known: Experience) -> None:
    known.fade(FADE_AFTER_S - 0.1)
    assert believed(known, "slow") == pytest.approx(0.02, rel=0.05)
    known.fade(FADE_AFTER_S + LOOK_EVERY_S)
    assert believed(known, "slow") == believed(known, "a") == pytest.approx(0.010, rel=0.01)
    assert believed(known, "b") == pytest.approx(0.0101, rel=0.005)


@pytest.mark.parametrize(("seen_s", "after_s"), [(0.0101, 0.010), (0.02, 0.02), (0.03, 0.02)])
def test_one_trial_decides_what_is_believed_from_then_on(known: Experience, seen_s: float, after_s: float) -> None:
    known.fade(FADE_AFTER_S + LOOK_EVERY_S)
    answers(known, "slow", seen_s)
    assert believed(known, "slow") == pytest.approx(after_s, rel=0.1)


def test_the_time_to_the_next_trial_doubles_up_to_a_limit_and_not_for_who_is_well_again(known: Experience) -> None:
    def until_faded(now: float) -> float:
        """When it is believed to be like others."""
        while believed(known, "slow") > 0.015:
            now += LOOK_EVERY_S
            known.fade(now)
        return now

    now, waits = 0.0, []
    for _ in range(7):
        known.fade(now)
        before, now = now, until_faded(now)
        waits.append(round(now - before))
        answers(known, "slow", 0.02)
        now += LOOK_EVERY_S
    assert waits == [30, 60, 120, 240, 480, 960, 960]
    now = until_faded(now)
    answers(known, "slow", 0.010)
    answers(known, "slow", 0.02, 150)
    known.fade(now + LOOK_EVERY_S)
    assert until_faded(now + LOOK_EVERY_S) - now == pytest.approx(FADE_AFTER_S, abs=2 * LOOK_EVERY_S)


def test_workers_that_are_gone_leave_no_belief_behind(known: Experience) -> None:
    known.keep_only(["a"])
    known.fade(1e6)
    assert {name for name, _ in known._fading._beliefs} == {"a"}


def test_a_worker_that_has_become_another_kind_is_not_believed_to_be_like_the_best_of_its_former_one(
    known: Experience,
) -> None:
    known.fade(FADE_AFTER_S + LOOK_EVERY_S)
    assert believed(known, "slow") == believed(known, "a")
    known.join(worker("stranger", weights="other"))
    answers(known, "stranger", 0.04, 2 * OWN_AFTER)
    known.join(worker("slow", weights="other"))
    assert believed(known, "slow") > 0.03


def test_other_kinds_and_other_laws_are_not_touched(known: Experience) -> None:
    known.join(worker("stranger", weights="other"))
    answers(known, "stranger", 0.04, 2 * OWN_AFTER)
    known.fade(LOOK_EVERY_S)
    prefill: Callable[[], object] = lambda: known.rates(Law.PREFILL, ("slow",))[0]  # noqa: E731
    before = prefill()
    known.fade(1000.0)
    assert believed(known, "stranger") == pytest.approx(0.04, rel=0.05)
    assert prefill() == before
    assert msgspec.json.encode(known.learned())
