"""Pages that were asked for, segment by segment: none comes twice, and a slot is held while something comes into it."""

from __future__ import annotations

import numpy as np

from kvrelay.store.arena import Ints
from kvrelay.store.page import Page, Writer
from kvrelay.store.room import Room
from kvrelay.store.wanted import Wanted
from kvrelay.types import SlotRef
from tests.store.conftest import FORMAT, STRIDE, page_name

LAYERS = FORMAT.layers


def rows(*numbers: int) -> Ints:
    return np.array(numbers, np.int64)


class Asked:
    """Three of the five pages of a push."""

    def __init__(self) -> None:
        shelf = Room(64 * STRIDE, 1).shelf(FORMAT)
        self.pages = [Page(page_name(slot), shelf, SlotRef(slot, 1), 8, Writer("p"), 0.0) for slot in range(3)]
        self.wanted = Wanted(5, LAYERS)
        self.wanted.add([4, 0, 2], self.pages)

    def take(self, index: int, *layers: int) -> list[bool]:
        return list(self.wanted.take(self.wanted.rows(rows(*[index] * len(layers))), rows(*layers)))


def test_what_was_not_asked_for_is_not_to_come() -> None:
    asked = Asked()
    assert asked.wanted.rows(np.arange(5)).tolist() == [2, 0, 3, 0, 1]
    assert (asked.take(1, 0, 1), asked.take(2, 0, 1)) == ([False, False], [True, True])


def test_a_segment_comes_once_unless_it_did_not_come_through() -> None:
    asked = Asked()
    assert (asked.take(4, 0, 1), asked.take(4, 0, 1, 2)) == ([True, True], [False, False, True])
    asked.wanted.put_back(asked.wanted.rows(rows(4)), rows(1))
    assert asked.take(4, 0, 1) == [False, True]


def test_a_page_is_whole_when_each_of_its_layers_was_verified() -> None:
    asked = Asked()
    first = int(asked.wanted.rows(rows(4))[0])
    assert asked.wanted.verified(rows(*[first] * (LAYERS - 1))).tolist() == [first]
    assert asked.wanted.layers_in(rows(first)).tolist() == [LAYERS - 1]
    asked.wanted.verified(rows(first))
    assert asked.wanted.layers_in(rows(first)).tolist() == [LAYERS]


def test_a_page_that_is_let_go_is_held_until_the_last_batch_for_it_is_through() -> None:
    asked = Asked()
    row = asked.wanted.rows(rows(0))
    asked.wanted.hold(row)
    asked.wanted.hold(row)
    assert asked.wanted.let_go(row) == []
    assert (asked.wanted.release(row), asked.wanted.release(row)) == ([], [asked.pages[1]])
    assert asked.wanted.let_go(asked.wanted.rows(rows(2))) == [asked.pages[2]]


def test_nothing_of_a_page_that_was_let_go_is_to_come() -> None:
    asked = Asked()
    asked.take(0, 0)
    asked.wanted.let_go(asked.wanted.rows(rows(0)))
    asked.wanted.put_back(asked.wanted.rows(rows(0)), rows(0))
    assert asked.take(0, *range(LAYERS)) == [False] * LAYERS
    assert len(asked.wanted) == 2


def test_rows_are_added_without_end() -> None:
    asked, wanted = Asked(), Wanted(1000, LAYERS)
    for index in range(1000):
        wanted.add([index], [asked.pages[0]])
    assert wanted.rows(rows(0, 999)).tolist() == [1, 1000]
    assert wanted.take(wanted.rows(rows(0, 999)), rows(0, 0)).tolist() == [True, True]
