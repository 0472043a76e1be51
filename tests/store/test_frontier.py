"""How far pages have come, told from their marks: each layer once, in order, whoever sets the marks and when."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvrelay.store.arena import Arena
from kvrelay.store.frontier import Frontier
from kvrelay.types import Shard, SlotRef
from tests.store.conftest import FORMAT

LAYERS = FORMAT.layers


class Rows:
    """Four pages of an arena, all of them watched."""

    def __init__(self) -> None:
        self.arena = Arena.create(FORMAT, 4, epoch=9)
        self.refs = self.arena.occupy([2, 0, 3, 1])
        self.frontier = Frontier(self.arena)
        self.frontier.extend(self.refs)

    def publish(self, row: int, *layers: int) -> None:
        for layer in layers:
            assert self.arena.publish(self.refs[row], layer, 1)

    def moved(self) -> list[int]:
        return list(self.frontier.advance())

    @property
    def layers(self) -> list[int]:
        return list(self.frontier.layers)


@pytest.fixture
def rows() -> Iterator[Rows]:
    rows = Rows()
    yield rows
    rows.arena.close()


def test_a_layer_is_noticed_once(rows: Rows) -> None:
    assert rows.moved() == []
    rows.publish(1, 0)
    assert (rows.moved(), rows.moved()) == ([1], [])
    assert rows.layers == [0, 1, 0, 0]


def test_layers_that_came_together_are_all_noticed(rows: Rows) -> None:
    rows.publish(0, *range(LAYERS))
    rows.publish(3, *range(LAYERS - 1))
    assert rows.moved() == [0, 3]
    assert rows.layers == [LAYERS, 0, 0, LAYERS - 1]


def test_a_layer_counts_once_those_before_it_are_in(rows: Rows) -> None:
    rows.publish(2, 0, LAYERS - 1)
    rows.moved()
    assert rows.layers == [0, 0, 1, 0]
    rows.publish(2, *range(1, LAYERS - 1))
    assert rows.moved() == [2]
    assert rows.layers == [0, 0, LAYERS, 0]


def test_a_layer_of_several_writers_counts_once_all_have_written_it(rows: Rows) -> None:
    rows.arena.publish(rows.refs[0], 0, 1, Shard(0, 2))
    assert rows.moved() == []
    rows.arena.publish(rows.refs[0], 0, 1, Shard(1, 2))
    assert rows.moved() == [0]


def test_marks_of_an_earlier_page_in_the_same_slot_mean_nothing(rows: Rows) -> None:
    rows.publish(0, *range(LAYERS))
    rows.arena.vacate(rows.refs[0].slot)
    assert rows.moved() == []
    rows.frontier.extend([SlotRef(rows.refs[0].slot, rows.refs[0].generation + 1)])
    assert rows.moved() == []


def test_rows_that_are_kept_keep_their_place_in_the_order(rows: Rows) -> None:
    rows.publish(1, 0)
    rows.moved()
    rows.frontier.keep(np.array([False, True, False, True]))
    assert rows.layers == [1, 0]
    rows.publish(3, 0)
    assert rows.moved() == [1]
