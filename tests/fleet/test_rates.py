"""Laws as plain numbers."""

from __future__ import annotations

import pytest

from kvrelay.fleet.experience import OWN_AFTER, Experience
from kvrelay.fleet.links import Links
from kvrelay.fleet.rates import Law
from tests.fleet.values import worker


def experience() -> Experience:
    known = Experience(Links())
    for name in ("a", "b"):
        known.join(worker(name))
    return known


def assert_true(known: Experience, *names: str) -> None:
    """The numbers are what each law says."""
    assert list(known.rates(Law.PREFILL, names)) == [known.prefill(name).rates for name in names]
    assert list(known.rates(Law.STEP, names)) == [known.step(name).rates for name in names]
    assert list(known.rates(Law.ANSWER, names)) == [known.answer(name).rates for name in names]

    for law in Law:
        laws = known.rates(law, names)
        assert list(zip(*(column.tolist() for column in laws.columns), strict=True)) == list(laws)


def test_they_follow_every_law_also_those_of_workers_that_believe_their_kind() -> None:
    known = experience()
    for number in range(2 * OWN_AFTER):
        known.saw("a", lambda perf: perf.saw_prefill(100, 0, 3.0).saw_step(2, 100, 0.5).saw_answer(0.2))
        if number % 3 == 0:
            known.saw("b", lambda perf: perf.saw_prefill(100, 0, 1.0))
        assert_true(known, "a", "b")
        assert_true(known, "b")


def test_a_worker_that_became_another_kind_is_read_anew() -> None:
    known = experience()
    known.saw("a", lambda perf: perf.saw_prefill(100, 0, 3.0))
    assert_true(known, "a", "b")
    known.join(worker("a", weights="other"))
    assert_true(known, "a", "b")


def test_a_worker_that_is_forgotten_is_unknown() -> None:
    known = experience()
    assert_true(known, "a", "b")
    known.keep_only(["b"])
    assert repr(known._rates[Law.STEP]) == "<RateBook 1 workers, 0 with rates of their own>"
    with pytest.raises(KeyError):
        known.rates(Law.STEP, ("a",))
