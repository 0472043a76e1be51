"""Which places hold which pages, against the plainest model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.fleet.extent import MAX_PAGES
from kvrelay.fleet.page_map import SLACK_SLOTS, PageMap, Run
from kvrelay.types import PageName
from tests.fleet.values import names


def held(pages: PageMap, place: int, wanted: list[PageName]) -> int:
    """Leading pages at one place."""
    count = 0
    for end, mask in pages.find(wanted):
        if not mask & place:
            break
        count = end
    return count


def test_only_an_unbroken_run_from_the_first_page_on_is_found() -> None:
    pages = PageMap(100)
    place = pages.open()
    pages.store(place, names(1, 2, 4))
    assert [held(pages, place, names(*chain)) for chain in [(1, 2, 3, 4), (2, 1), (4,), (9,), ()]] == [2, 2, 1, 0, 0]


def test_places_that_hold_unlike_parts_of_a_prompt_give_a_run_each() -> None:
    pages = PageMap(1000)
    places = [pages.open() for _ in range(3)]
    chain = names(*range(300))
    for place, length in zip(places, (300, 130, 7), strict=True):
        pages.store(place, chain[:length])
    first, second, third = places
    assert pages.find(chain) == [Run(7, first | second | third), Run(130, first | second), Run(300, first)]


def test_a_prompt_that_leaves_a_known_chain_is_found_up_to_there_and_on_in_its_own() -> None:
    pages = PageMap(1000)
    place = pages.open()
    pages.store(place, names(*range(100)))
    pages.store(place, names(*range(50), *range(500, 550)))
    assert pages.find(names(*range(50), *range(500, 550), 7)) == [Run(101, place)]
    assert held(pages, place, names(*range(50), *range(500, 560))) == 100


def test_a_closed_place_is_empty_at_once_and_its_bit_is_used_again_only_when_it_is_nowhere() -> None:
    pages = PageMap(10_000)
    old, other = pages.open(), pages.open()
    pages.store(old, names(*range(5000)))
    pages.store(other, names(*range(2500, 3000)))
    pages.close(old)
    assert pages.find(names(1)) == []
    fresh = pages.open()
    assert fresh not in (old, other)
    assert held(pages, fresh, names(1)) == held(pages, other, names(1)) == 0
    while len(pages) > 500:
        before = len(pages)
        pages.sweep(2)
        pages.check_invariants()
        assert len(pages) < before
    pages.sweep(100)
    assert pages.open() == old
    assert held(pages, other, names(*range(2500, 3000))) == 500


def test_an_empty_place_gives_its_bit_back_at_once() -> None:
    pages = PageMap(10)
    place = pages.open()
    pages.close(place)
    assert pages.open() == place


def test_names_over_the_limit_are_misses_and_counted_and_known_ones_take_no_room() -> None:
    pages = PageMap(10)
    one, two = pages.open(), pages.open()
    pages.store(one, names(*range(8)))
    pages.store(two, names(*range(4, 16)))
    assert (len(pages), pages.turned_away) == (10, 6)
    assert held(pages, two, names(*range(4, 16))) == 6
    pages.remove(one, names(0, 1, 2))
    pages.store(two, names(*range(4, 16)))
    assert held(pages, two, names(*range(4, 16))) == 9
    pages.check_invariants()


def test_a_name_that_comes_twice_in_one_event_stands_in_one_slot() -> None:
    pages = PageMap(10)
    place = pages.open()
    pages.store(place, names(1, 1, 2, 1))
    pages.check_invariants()
    pages.remove(place, names(1, 1, 2, 2))
    pages.check_invariants()
    assert (len(pages), pages.count(place)) == (0, 0)


def test_memory_of_pages_that_went_comes_back_also_from_between_pages_that_stay() -> None:
    pages = PageMap(1_000_000)
    place = pages.open()
    for begin in range(0, 100_000, 100):
        pages.store(place, names(*range(begin, begin + 100)))
    pages.remove(place, names(*(number for number in range(100_000) if number % 50)))
    assert len(pages) == 2000
    for _ in range(20):
        pages.sweep(64)
    pages.check_invariants()
    assert pages._slots <= 2 * len(pages) + SLACK_SLOTS
    assert all(held(pages, place, names(number)) == 1 for number in range(0, 100_000, 50))


def test_an_extent_of_which_nothing_is_left_is_gone() -> None:
    pages = PageMap(1_000_000)
    place = pages.open()
    for begin in range(0, 40 * MAX_PAGES, MAX_PAGES // 2):
        pages.store(place, names(*range(begin, begin + MAX_PAGES // 2)))
        pages.remove(place, names(*range(begin, begin + MAX_PAGES // 2)))
    assert pages._slots <= MAX_PAGES
    pages.check_invariants()


NAMES = st.lists(st.integers(0, 30), max_size=12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["store", "remove", "close", "sweep"]), st.integers(0, 2), NAMES), max_size=25)
)
def test_it_answers_as_one_set_of_names_a_place_would(steps: list[tuple[str, int, list[int]]]) -> None:
    pages = PageMap(1000)
    places = [pages.open() for _ in range(3)]
    model: list[set[int]] = [set(), set(), set()]
    for action, which, numbers in steps:
        if action == "store":
            pages.store(places[which], names(*numbers))
            model[which].update(numbers)
        elif action == "remove":
            pages.remove(places[which], names(*numbers))
            model[which].difference_update(numbers)
        elif action == "close":
            pages.close(places[which])
            places[which], model[which] = pages.open(), set()
        else:
            pages.sweep(1)
        pages.check_invariants()
        for place, expected in zip(places, model, strict=True):
            missing = next((at for at, number in enumerate(numbers) if number not in expected), len(numbers))
            assert held(pages, place, names(*numbers)) == missing
            assert pages.count(place) == len(expected)
