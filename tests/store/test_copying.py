"""Copies of whole pages: right, or none at all."""

from __future__ import annotations

import pytest

from kvrelay.errors import Lost
from kvrelay.store.arena import Arena
from kvrelay.store.copying import read_page, read_page_into, write_page
from kvrelay.types import SlotRef
from tests.store.conftest import FORMAT, payload


@pytest.fixture
def arena() -> Arena:
    return Arena.create(FORMAT, slots=3, epoch=1 << 46)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_pages_of_every_length_come_back_and_touch_no_neighbour(arena: Arena, tokens: int) -> None:
    before, ref, after = arena.occupy([*range(3)])
    for neighbour in (before, after):
        write_page(arena, neighbour, payload(9), 8)
    write_page(arena, ref, payload(1, tokens), tokens)
    assert read_page(arena, ref, tokens) == payload(1, tokens)
    assert read_page(arena, before, 8) == read_page(arena, after, 8) == payload(9)


def test_segments_lie_where_the_layer_by_layer_readers_look(arena: Arena) -> None:
    (ref,) = arena.occupy([1])
    for tokens in (8, 3):
        data = payload(1, tokens)
        write_page(arena, ref, data, tokens)
        size = len(data) // FORMAT.layers
        for layer in range(FORMAT.layers):
            assert bytes(arena.segment(1, layer, tokens)) == data[layer * size : (layer + 1) * size]


@pytest.mark.parametrize("layers", [[0], [2], [0, 1, 2], [0, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("tokens", [8, 5])
def test_views_are_the_segments_in_the_order_asked_for(arena: Arena, layers: list[int], tokens: int) -> None:
    (ref,) = arena.occupy([0])
    write_page(arena, ref, payload(1, tokens), tokens)
    joined = b"".join(arena.views(0, layers, tokens))
    assert joined == b"".join(arena.segment(0, layer, tokens) for layer in layers)
    if layers == [0, 1, 2] and tokens == 8:
        assert len(arena.views(0, layers, tokens)) == 1


@pytest.mark.parametrize("layer", range(FORMAT.layers))
@pytest.mark.parametrize("bit", [0, 8 * 2047 + 7])
def test_any_flipped_bit_is_a_miss(arena: Arena, layer: int, bit: int) -> None:
    (ref,) = arena.occupy([0])
    write_page(arena, ref, payload(1), 8)
    arena.segment(0, layer, 8)[bit // 8] ^= 1 << bit % 8
    assert read_page(arena, ref, 8) is None
    assert not read_page_into(arena, ref, 8, memoryview(bytearray(len(payload(1)))))


def test_a_page_with_a_missing_layer_is_a_miss(arena: Arena) -> None:
    (ref,) = arena.occupy([0])
    for layer in (0, 1):
        arena.publish(ref, layer, 1 + layer)
    assert read_page(arena, ref, 8) is None


class Moving(Arena):
    """An arena whose slot is given to another page while it is being copied."""

    def views(self, slot: int, layers: list[int], tokens: int) -> list[memoryview]:
        views = super().views(slot, layers, tokens)
        self.vacate(slot)
        (new,) = self.occupy([slot])
        for layer in layers:
            self.publish(new, layer, 0)
        return views


def test_a_slot_that_is_reused_during_the_copy_is_a_miss() -> None:
    arena = Moving.create(FORMAT, slots=1, epoch=1)
    (ref,) = arena.occupy([0])
    Arena.views(arena, 0, [0], 8)
    for layer in range(FORMAT.layers):
        arena.publish(ref, layer, 0)
    assert read_page(arena, ref, 8) is None


def test_a_slot_of_another_arena_is_lost_before_a_byte_is_written(arena: Arena) -> None:
    for ref in (SlotRef(0, 1), SlotRef(7, 1 << 46)):
        with pytest.raises(Lost, match="restarted"):
            write_page(arena, ref, payload(1), 8)
    assert not arena.data.any()
