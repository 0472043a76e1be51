"""Laws as a matrix."""

from __future__ import annotations

import pytest

from kvrelay.fleet.experience import OWN_AFTER, Experience
from kvrelay.fleet.links import Links
from kvrelay.fleet.rates import MAX_SHEETS, Law
from tests.fleet.values import worker


def experience() -> Experience:
    known = Experience(Links())
    for name in ("a", "b"):
        known.join(worker(name))
    return known


def assert_true(known: Experience, names: tuple[str, ...]) -> None:
    """The matrix says what each law says."""
    table = known.rates(names)
    for column, name in enumerate(names):
        assert table[Law.PREFILL.value, column] == pytest.approx(known.prefill(name).rates)
        assert table[Law.STEP.value, column] == pytest.approx(known.step(name).rates)
        assert table[Law.ANSWER.value, column] == pytest.approx(known.answer(name).rates)


def test_it_follows_every_law_also_those_of_workers_that_believe_their_kind() -> None:
    known = experience()
    for number in range(2 * OWN_AFTER):
        known.saw("a", lambda perf: perf.saw_prefill(100, 0, 3.0).saw_step(2, 100, 0.5).saw_answer(0.2))
        if number % 3 == 0:
            known.saw("b", lambda perf: perf.saw_prefill(100, 0, 1.0))
        assert_true(known, ("a", "b"))
        assert_true(known, ("b",))


def test_a_worker_that_became_another_kind_is_read_anew() -> None:
    known = experience()
    known.saw("a", lambda perf: perf.saw_prefill(100, 0, 3.0))
    assert_true(known, ("a", "b"))
    known.join(worker("a", weights="other"))
    assert_true(known, ("a", "b"))


def test_whoever_was_given_a_matrix_keeps_it() -> None:
    known = experience()
    before = known.rates(("a",))
    kept = before.copy()
    known.saw("a", lambda perf: perf.saw_prefill(100, 0, 3.0))
    assert_true(known, ("a",))
    assert (before == kept).all()


def test_their_number_is_bounded() -> None:
    known = experience()
    for number in range(3 * MAX_SHEETS):
        known.join(worker(f"w{number}"))
        known.rates((f"w{number}",))
    assert int(repr(known._sheets).split()[1][:-1]) <= MAX_SHEETS
