"""Prefixes that are on their way, found by the names of their pages."""

from __future__ import annotations

import pytest

from kvrelay.fleet import underway
from kvrelay.fleet.underway import MOST_WORKS, Underway, Work
from tests.fleet.values import names


def work(key: str, *numbers: int, first: int = 0) -> Work:
    return Work(
        key=key, names=tuple(names(*numbers)), first=first, worker="p", stores=frozenset(), begin_s=0.0, seconds=1.0
    )


def found(known: Underway, *numbers: int) -> list[tuple[str, int]]:
    known.check_invariants()
    return [(each.key, pages) for each, pages in known.find(names(*numbers))]


def test_the_longest_prefix_comes_first() -> None:
    known = Underway()
    known.begin(work("a", 1, 2))
    known.begin(work("b", 1, 2, 3, 4, first=2))
    assert found(known, 1, 2, 3, 9) == [("b", 3), ("a", 2)]
    assert found(known, 1, 8) == [("a", 1)]
    assert found(known, 8, 9) == []


def test_a_page_is_the_work_s_that_was_first_to_bring_it() -> None:
    known = Underway()
    known.begin(work("a", 1, 2))
    known.begin(work("b", 1, 2, 3))
    assert found(known, 1, 2) == [("a", 2)]
    known.end("a")
    assert found(known, 1, 2, 3) == [("b", 3)]
    known.end("b")
    known.end("b")
    assert (found(known, 1, 2, 3), len(known)) == ([], 0)


@pytest.mark.parametrize("over", ["a", "b", "c"])
def test_what_several_bring_is_under_way_until_the_last_of_them_is_over(over: str) -> None:
    known = Underway()
    for key in "abc":
        known.begin(work(key, 1, 2))
    known.end(over)
    first, second = [key for key in "abc" if key != over]
    assert found(known, 1, 2, 3) == [(first, 2)]
    known.end(first)
    assert found(known, 1, 2, 3) == [(second, 2)]
    known.end(second)
    assert (found(known, 1, 2, 3), repr(known)) == ([], "<Underway 0 works, 0 pages>")


def test_only_pages_that_are_lacking_are_on_their_way() -> None:
    known = Underway()
    known.begin(work("a", 1, 2, first=2))
    assert (found(known, 1, 2), len(known)) == ([], 0)


def test_one_prompt_is_told_of_a_few_works_and_too_many_pages_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Underway()
    chain = list(range(1, 12))
    for length in range(1, 10):
        known.begin(work(str(length), *chain[:length], first=length - 1))
    assert found(known, *chain) == [(str(length), length) for length in range(9, 9 - MOST_WORKS, -1)]
    monkeypatch.setattr(underway, "MAX_NAMES", 10)
    known.begin(work("too long", 21, 22))
    assert found(known, 21, 22) == []
