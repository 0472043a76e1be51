"""The fewest seconds win; equals take turns; the others are kept."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from kvrelay.policy.cost import Kind
from kvrelay.policy.route import Decision, Path, choose
from tests.policy.values import decodes, prefills, prompt, source, ways


def picked(decision: Decision | None) -> tuple[str | None, str]:
    assert decision is not None
    return decision.chosen.prefill, decision.chosen.decode


@pytest.mark.parametrize(
    ("queue_s", "cached", "last_chosen", "chosen"),
    [
        ([0.5, 0.4], [0, 0], [0, 0], "p1"),
        ([0.0, 0.0], [0, 640], [0, 0], "p1"),
        # A hot prefix is worth its seconds and P's, and no more: a longer queue sends the prompt elsewhere.
        ([0.0, 0.60], [0, 640], [0, 0], "p1"),
        ([0.0, 0.72], [0, 640], [0, 0], "p0"),
        ([0.0, 0.0], [0, 0], [2, 1], "p1"),
        ([0.0, 0.009], [0, 0], [2, 1], "p1"),  # equal but for less than one per cent
        ([0.0, 0.02], [0, 0], [2, 1], "p0"),
        ([0.0, 0.0], [0, 0], [0, 0], "p0"),
    ],
)
def test_the_p_that_is_done_first_is_chosen(
    queue_s: list[float], cached: list[float], last_chosen: list[int], chosen: str
) -> None:
    there = prefills(2, queue_s=queue_s, cached=cached, last_chosen=last_chosen)
    assert picked(choose(prompt(1000), there, decodes(1), ways(2, 1))) == (chosen, "d0")


@pytest.mark.parametrize(
    ("more", "chosen"),
    [
        ({"sequences": [2, 1]}, "d1"),
        # A nearly full worker is avoided although it runs fewer sequences.
        ({"sequences": [1, 5], "kv": [98_000, 10_000]}, "d1"),
        # The same tokens weigh less on a larger pool.
        ({"sequences": [1, 1], "kv": 60_000, "capacity": [80_000, 400_000]}, "d1"),
        ({"last_chosen": [9, 8]}, "d1"),
        ({"queue_s": [1.3, 0.0]}, "d1"),
        # What D computes itself is done when P is.
        ({"queue_s": [0.9, 0.0]}, "d0"),
    ],
)
def test_the_d_that_costs_least_is_chosen(more: dict[str, object], chosen: str) -> None:
    there = decodes(2, **more)  # type: ignore[arg-type]
    assert picked(choose(prompt(1000), prefills(1), there, ways(1, 2))) == ("p0", chosen)


@pytest.mark.parametrize(("bytes_per_s", "chosen"), [(1e9, "d0"), (5e5, "d1")])
def test_what_d_s_node_has_counts_where_the_link_is_slow(bytes_per_s: float, chosen: str) -> None:
    link = ways(1, 2, bytes_per_s=bytes_per_s, stored=[0, 1000])
    assert picked(choose(prompt(1000), prefills(1), decodes(2), link)) == ("p0", chosen)


def test_a_prompt_that_others_stand_back_for_goes_where_it_delays_nobody() -> None:
    there = prefills(2, passed=[1, 0], queue_s=[0.0, 0.9])
    decision = choose(prompt(1000), there, decodes(1), ways(2, 1))
    assert picked(decision) == ("p1", "d0")
    assert decision is not None
    (other,) = decision.runners_up
    assert other.prefill == "p0"
    assert dict(other.items)["harm"] == pytest.approx(1.0)
    assert other.ttft_s < decision.chosen.ttft_s


def test_p_and_d_are_chosen_together() -> None:
    """The idle P has no fast way to the idle D."""
    slow = ways(2, 2, bytes_per_s=[[1e5, 1e9], [1e9, 1e9]])
    there = decodes(2, sequences=[0, 20], kv=[0, 20_000])
    assert picked(choose(prompt(1000), prefills(2, queue_s=[0.0, 0.3]), there, slow)) == ("p1", "d0")


@pytest.mark.parametrize(
    ("tokens", "cached_on_d", "running", "path"),
    [
        (4, 0, 0, Path.LOCAL),  # too short to be worth a hand-off
        (1000, 0, 0, Path.REMOTE_PREFILL),
        (1000, 997, 0, Path.LOCAL),  # D has nearly all of it
        (1000, 900, 0, Path.REMOTE_PREFILL),
        (4, 0, 40, Path.REMOTE_PREFILL),  # forty streams would stand still
        (4, 0, 1, Path.LOCAL),
    ],
)
def test_a_prompt_stays_on_d_when_that_delays_everybody_less_than_a_hand_off(
    tokens: int, cached_on_d: int, running: int, path: Path
) -> None:
    there = decodes(1, computes=True, cached=cached_on_d, sequences=running, running=max(1, running))
    decision = choose(prompt(tokens), prefills(1, cached=cached_on_d), there, ways(1, 1))
    assert decision is not None
    assert decision.chosen.path is path
    assert (decision.chosen.prefill is None) == (path is Path.LOCAL)
    assert {option.path for option in (decision.chosen, *decision.runners_up)} == {Path.LOCAL, Path.REMOTE_PREFILL}


@pytest.mark.parametrize(
    ("queue_s", "passed", "running", "path"),
    [
        (0.0, 0, 6, Path.REMOTE_PREFILL),  # an idle P delays nobody
        (0.1, 0, 6, Path.REMOTE_PREFILL),
        (0.15, 1, 6, Path.LOCAL),  # it would wait for a step of a long prompt, and then keep that one waiting
        (0.3, 0, 6, Path.LOCAL),  # it would wait for others like it
        (0.15, 1, 20, Path.REMOTE_PREFILL),
    ],
)
def test_a_short_prompt_need_not_queue_where_d_computes_it_at_less_cost(
    queue_s: float, passed: int, running: int, path: Path
) -> None:
    there = decodes(1, computes=True, sequences=running, running=running)
    decision = choose(prompt(64), prefills(1, queue_s=queue_s, passed=[passed]), there, ways(1, 1))
    assert decision is not None
    assert decision.chosen.path is path


def test_a_prefix_is_pulled_or_waited_for_when_that_is_cheaper_than_to_compute_it() -> None:
    peer = source(Kind.PEER, [900, 0], [0.1, 0], "s2")
    running = source(Kind.UNDERWAY, [0, 950], [0, 0.3], "r1/0/0")
    there = prefills(2, more=[peer, running])
    decision = choose(prompt(1000), there, decodes(1), ways(2, 1))
    assert decision is not None
    assert (decision.chosen.prefill, decision.chosen.source, decision.chosen.cached_tokens) == (
        "p0",
        (Kind.PEER, "s2"),
        900,
    )
    assert dict(decision.chosen.items)["source"] == pytest.approx(0.1)
    (other,) = decision.runners_up
    assert (other.prefill, other.source, other.cached_tokens) == ("p1", (Kind.UNDERWAY, "r1/0/0"), 950)


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose(prompt(), prefills(0), decodes(1), ways(0, 1)) is None
    assert choose(prompt(), prefills(1), decodes(0), ways(1, 0)) is None
    assert choose(prompt(), prefills(1), decodes(1), ways(1, 1, allowed=False)) is None


def test_a_decision_says_why_and_what_else_there_was() -> None:
    decision = choose(prompt(1000), prefills(3, queue_s=[0.0, 1.0, 2.0]), decodes(2, sequences=[0, 3]), ways(3, 2))
    assert decision is not None
    reasons = decision.explain()
    assert reasons["cost_s"] == {
        "queue": 0.0,
        "source": 0.0,
        "prefill": 1.0,
        "transfer": 0.005,
        "decode_wait": 0.0,
        "answer": 0.01,
        "harm": 0.0,
        "effort": pytest.approx(0.1),
        "pressure": pytest.approx(0.01 * 0.011 / 0.989, abs=1e-6),
    }
    assert reasons["ttft_s"] == 1.015
    assert decision.chosen.tpot_s == pytest.approx(0.01 + 1e-3 + 1100 * 1e-6)
    totals = [option.total_s for option in (decision.chosen, *decision.runners_up)]
    assert len(totals) == 4
    assert totals == sorted(totals)
    assert msgspec.json.encode(reasons)


def test_the_same_state_gives_the_same_decision() -> None:
    chance = random.Random(3)
    queue = [chance.choice((0.0, 0.1)) for _ in range(64)]
    decisions = {
        msgspec.json.encode(
            choose(prompt(1000), prefills(64, queue_s=queue), decodes(64, sequences=queue), ways(64, 64))
        )
        for _ in range(5)
    }
    assert len(decisions) == 1


# ---------------------------------------------------------------- what happens under load


class Pool:
    """Prefill workers that compute one prompt after the other, and remember what they computed."""

    def __init__(self, count: int) -> None:
        self.busy_until_s = [0.0] * count
        self.worked_s = [0.0] * count
        self.holds: list[set[str]] = [set() for _ in range(count)]
        self.last_chosen = [0] * count
        self.turn = 0

    def serve(self, prefix: str, now: float, *, shared: int = 4000, own: int = 200) -> tuple[int, bool]:
        """Route a prompt of ``shared + own`` tokens; which worker got it, and whether it held the prefix."""
        count = len(self.holds)
        queue_s = [max(0.0, until - now) for until in self.busy_until_s]
        cached = [shared if prefix in held else 0 for held in self.holds]
        there = prefills(count, queue_s=queue_s, cached=cached, last_chosen=self.last_chosen)
        decision = choose(prompt(shared + own), there, decodes(1), ways(count, 1))
        assert decision is not None
        assert decision.chosen.prefill is not None
        chosen = int(decision.chosen.prefill[1:])
        hit = prefix in self.holds[chosen]
        work_s = (own if hit else shared + own) * 1e-3
        self.busy_until_s[chosen] = now + queue_s[chosen] + work_s
        self.worked_s[chosen] += work_s
        self.holds[chosen].add(prefix)
        self.turn += 1
        self.last_chosen[chosen] = self.turn
        return chosen, hit


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9, 1.5])
def test_a_hot_prefix_spreads_and_yet_hits(load: float) -> None:
    """Nine of ten of 400 requests share a prefix. Pure affinity would hit with all of them but the first.

    Load is work: as long as its holder has nothing to do, no other worker is better for a hot prefix.
    """
    pool, chance, now = Pool(4), random.Random(5), 0.0
    hits, mean_s = 0, 0.9 * 0.2 + 0.1 * 4.2
    for number in range(400):
        now += chance.expovariate(4 * load / mean_s)
        hits += pool.serve("hot" if chance.random() < 0.9 else f"cold {number}", now)[1]
    assert max(pool.worked_s) <= 2 * sum(pool.worked_s) / 4
    assert hits >= 0.8 * (0.9 * 400 - 1)


def test_a_hot_prefix_that_all_want_at_once_is_computed_on_all() -> None:
    pool = Pool(4)
    chosen = Counter(pool.serve("hot", 0.0)[0] for _ in range(400))
    assert max(chosen.values()) <= 2 * 400 / 4


def test_eight_prompts_at_once_are_spread_over_eight_idle_workers() -> None:
    pool = Pool(8)
    assert len({pool.serve(f"prompt {number}", 0.0)[0] for number in range(8)}) == 8
