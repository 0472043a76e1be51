"""Like workers are told apart by how fast they were, and by nothing else."""

from __future__ import annotations

import random

import pytest

from kvrelay.fleet.experience import OWN_AFTER, Experience
from kvrelay.fleet.links import Links
from kvrelay.fleet.rates import Law
from tests.fleet.values import worker

SHORT, LONG = 500, 12_000


def prefill_s(tokens: int) -> float:
    """What no law can say exactly: steps of 8192 tokens, each of which grows with its square."""
    steps = [min(8192, tokens - start) for start in range(0, tokens, 8192)]
    return sum(0.0165 + 1.5e-5 * new + 4.2e-10 * new**2 for new in steps)


class Pair:
    """Two workers of a kind."""

    def __init__(self) -> None:
        self.known = Experience(Links())
        self._chance = random.Random(1)
        for name in ("a", "b"):
            self.known.join(worker(name))

    def prefill(self, name: str, tokens: int, *, slower: float = 1.0, noise: float = 0.0) -> None:
        seconds = slower * prefill_s(tokens) * self._chance.lognormvariate(0.0, noise)
        self.known.saw(name, lambda perf: perf.saw_prefill(tokens, 0, seconds))

    def ratio(self, tokens: int) -> float:
        """How many times as long ``a`` is believed to take as ``b``."""
        return self.known.perf("a").prefill_s(tokens) / self.known.perf("b").prefill_s(tokens)


def test_like_workers_that_saw_other_prompts_are_equally_fast_at_all_of_them() -> None:
    pair = Pair()
    for number in range(200):
        pair.prefill("a", SHORT + number % 7)
        pair.prefill("b", LONG if number % 4 else SHORT)
    own = [perf.prefill_s(LONG) for _, perf in pair.known._workers.values()]
    assert abs(own[0] / own[1] - 1.0) > 0.1, "what each alone would say of long prompts is no measure"
    assert pair.ratio(LONG) == pair.ratio(SHORT) == pytest.approx(1.0, rel=0.05)


def test_a_difference_that_may_be_chance_is_none() -> None:
    pair = Pair()
    for _ in range(100):
        for name in ("a", "b"):
            pair.prefill(name, SHORT, noise=0.15)
    assert pair.ratio(SHORT) == 1.0
    assert pair.known._workers["a"][1].prefill.rates != pair.known._workers["b"][1].prefill.rates


@pytest.mark.parametrize("slower", [1.3, 2.0, 4.0])
def test_a_worker_that_has_become_slower_is_seen_to_be_so_in_four_requests(slower: float) -> None:
    pair = Pair()
    for number in range(40):
        for name in ("a", "b"):
            pair.prefill(name, SHORT + 100 * (number % 5))
    assert pair.ratio(SHORT) == pytest.approx(1.0, rel=0.002)
    for _ in range(4):
        pair.prefill("a", SHORT, slower=slower)
    assert pair.ratio(SHORT) > 1.01, "more than what counts as equal"
    for _ in range(OWN_AFTER):
        pair.prefill("a", SHORT, slower=slower)
        pair.prefill("b", SHORT)
    assert pair.ratio(SHORT) == pytest.approx(slower, rel=0.15)


def test_a_slower_worker_of_two_does_not_make_the_other_look_slower() -> None:
    pair = Pair()
    for number in range(100):
        pair.prefill("a", SHORT + number % 7, slower=2.0)
        pair.prefill("b", SHORT + number % 7)
    assert pair.known.perf("a").prefill_s(SHORT) == pytest.approx(2 * prefill_s(SHORT), rel=0.1)
    assert pair.known.perf("b").prefill_s(SHORT) == pytest.approx(prefill_s(SHORT), rel=0.1)


def test_workers_that_are_gone_leave_nothing_behind() -> None:
    pair = Pair()
    for name in ("a", "b"):
        pair.prefill(name, SHORT)
    pair.known.keep_only(["a"])
    assert set(pair.known._likeness._shown) == {("a", Law.PREFILL)}
