from __future__ import annotations

from typing import cast

import pytest

from kvrelay.connector.unfilled import PlannedPages
from kvrelay.store.arena import Arena
from kvrelay.types import SlotRef
from tests.connector.fakes import FakeArena

PAGES = [SlotRef(0, 1), SlotRef(1, 1)]


def arena(**fields: object) -> Arena:
    return cast(Arena, FakeArena(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wait_s", "after_s", "missing"), [(0.0, 0.0, PAGES), (2.0, 1.9, []), (2.0, 2.0, PAGES), (2.0, 60.0, PAGES)]
)
def test_an_unfilled_page_is_missing_after_its_time(wait_s: float, after_s: float, missing: list[SlotRef]) -> None:
    planned, store = PlannedPages(wait_s), arena(whole=False)
    planned.add(100.0, store, PAGES)
    assert planned.missing(100.0 + after_s, store) == missing


def test_a_missing_page_is_told_once() -> None:
    planned, store = PlannedPages(0.0), arena(whole=False)
    planned.add(0.0, store, PAGES)
    assert planned.missing(1.0, store) == PAGES
    assert planned.missing(2.0, store) == []


def test_steps_are_told_in_turn() -> None:
    planned, store = PlannedPages(2.0), arena(whole=False)
    planned.add(0.0, store, PAGES[:1])
    planned.add(1.0, store, PAGES[1:])
    assert planned.missing(2.5, store) == PAGES[:1]
    assert planned.missing(3.0, store) == PAGES[1:]


def test_pages_that_are_whole_or_given_away_are_not_missing() -> None:
    planned, store = PlannedPages(0.0), arena(whole=False, gone={PAGES[0]})
    planned.add(0.0, store, PAGES)
    assert planned.missing(1.0, store) == PAGES[1:]
    planned.add(2.0, whole := arena(), PAGES)
    assert planned.missing(3.0, whole) == []


def test_pages_of_a_store_that_is_gone_are_forgotten() -> None:
    planned, old, new = PlannedPages(0.0), arena(whole=False), arena(whole=False)
    planned.add(0.0, old, PAGES)
    assert planned.missing(1.0, new) == []
    assert planned.missing(1.0, None) == []
    planned.add(1.0, new, [])
    assert planned.missing(2.0, old) == []
