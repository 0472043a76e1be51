"""Pages that a peer asked for together: each of their layers is given out once, when it is in, page after page."""

from __future__ import annotations

import pytest

from kvrelay.store.cohort import Cohort
from kvrelay.store.page import Page, Writer
from kvrelay.store.room import Room
from kvrelay.types import SlotRef
from tests.store.conftest import FORMAT, STRIDE, page_name

LAYERS = FORMAT.layers
ALL = 1000


class Pages:
    """Three pages that are being filled, the last one partial, asked for by a peer."""

    def __init__(self, lent: tuple[SlotRef, ...] = ()) -> None:
        shelf = Room(64 * STRIDE, 1).shelf(FORMAT)
        self.arena = shelf.arena
        refs = self.arena.occupy([*range(3)])
        self.pages = [
            Page(page_name(number), shelf, ref, tokens, Writer("w"), 0.0)
            for number, (ref, tokens) in enumerate(zip(refs, (8, 8, 3), strict=True))
        ]
        self.cohort = Cohort(self.arena, [10, 11, 12], self.pages, lent)

    def publish(self, number: int, *layers: int) -> None:
        for layer in layers:
            self.arena.publish(self.pages[number].ref, layer, 1)

    def take(self, limit: int = ALL) -> list[tuple[int, int]]:
        portion = self.cohort.take(limit)
        return list(zip(portion.pages.tolist(), portion.places.layers.tolist(), strict=True))


def test_layers_are_given_out_once_as_they_come_in() -> None:
    pages = Pages()
    assert pages.take() == []
    pages.publish(0, 0, 1)
    pages.publish(1, 0)
    assert pages.take() == [(10, 0), (10, 1), (11, 0)]
    assert pages.take() == []
    pages.publish(0, 2)
    assert pages.take() == [(10, 2)]


@pytest.mark.parametrize("limit", [1, 2, 4, ALL])
def test_a_limit_cuts_anywhere_and_loses_nothing(limit: int) -> None:
    pages = Pages()
    for number in range(3):
        pages.publish(number, *range(LAYERS))
    found: list[tuple[int, int]] = []
    while portion := pages.take(limit):
        assert len(portion) <= limit
        found += portion
    assert found == [(10 + number, layer) for number in range(3) for layer in range(LAYERS)]
    assert pages.cohort.is_through


def test_it_is_not_through_while_a_layer_is_lacking() -> None:
    pages = Pages()
    for number in range(3):
        pages.publish(number, *range(LAYERS - 1))
    pages.take()
    assert not pages.cohort.is_through


def test_places_say_where_segments_lie_here_and_there() -> None:
    pages = Pages((SlotRef(7, 70), SlotRef(5, 50), SlotRef(6, 60)))
    pages.publish(1, 0)
    pages.publish(2, 0)
    places = pages.cohort.take(ALL).places
    assert (places.slots.tolist(), places.targets.tolist(), places.generations.tolist()) == ([1, 2], [5, 6], [50, 60])
    assert places.sizes.tolist() == [8 * FORMAT.token_layer_bytes, 3 * FORMAT.token_layer_bytes]
    unlent = Pages()
    unlent.publish(0, 0)
    assert unlent.cohort.take(ALL).places.targets.tolist() == [-1]
