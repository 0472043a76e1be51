"""The arena: two mappings of one memory, references that go stale, marks that vouch for bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvrelay.errors import Incompatible, Malformed
from kvrelay.store.arena import Arena, SlotState
from kvrelay.store.geometry import slot_stride
from kvrelay.types import WHOLE, PageFormat, Shard, SlotRef

FORMAT = PageFormat(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4)


@pytest.fixture
def arena() -> Arena:
    return Arena.create(FORMAT, slots=5, epoch=1000)


def test_two_mappings_see_the_same_bytes_and_marks(arena: Arena) -> None:
    other = Arena.attach(os.dup(arena.fd), FORMAT)
    (ref,) = arena.occupy([2])
    other.segment(2, 1, 3)[:] = bytes(range(192))
    assert other.publish(ref, 1, 77)
    slots, generations = np.array([2]), np.array([ref.generation])
    assert bytes(arena.segment(2, 1, 3)) == bytes(range(192))
    assert [bool(arena.ready(slots, generations, layer)[0]) for layer in range(3)] == [False, True, False]
    assert arena.checksums(slots, 1).tolist() == [[77]]
    assert (other.epoch, other.slots, other.data.shape) == (1000, 5, (5, slot_stride(FORMAT)))


def test_segments_of_different_layers_and_slots_do_not_overlap(arena: Arena) -> None:
    for slot in range(5):
        for layer in range(3):
            arena.segment(slot, layer, 4)[:] = bytes([slot * 3 + layer]) * FORMAT.segment_bytes
    for slot in range(5):
        for layer in range(3):
            assert set(arena.segment(slot, layer, 4)) == {slot * 3 + layer}
            start = layer * FORMAT.segment_bytes
            assert arena.data[slot, start] == slot * 3 + layer


def test_a_vacated_slot_makes_its_references_stale(arena: Arena) -> None:
    (old,) = arena.occupy([0])
    arena.publish(old, 0, 1)
    arena.vacate(0)
    (new,) = arena.occupy([0])
    assert new.generation == old.generation + 1
    assert arena.is_current(new)
    assert not arena.is_current(old)
    assert arena.is_failed(old)
    assert not arena.is_failed(new)
    assert not arena.publish(old, 1, 5)
    both = np.array([0, 0]), np.array([old.generation, new.generation])
    assert arena.ready(*both, 0).tolist() == [False, False]
    assert not arena.ready_layers(*both).any()


def test_many_pages_are_looked_at_together_as_each_one_would_be(arena: Arena) -> None:
    refs = arena.occupy([*range(4)])
    arena.vacate(1)
    arena.set_state(2, SlotState.FAILED)
    slots, generations = np.array([0, 1, 2, 3]), np.array([ref.generation for ref in refs])
    assert arena.current(slots, generations).tolist() == [arena.is_current(ref) for ref in refs]
    assert arena.lost(slots, generations).tolist() == [arena.is_failed(ref) for ref in refs]
    assert arena.lost(slots, generations).tolist() == [False, True, True, False]


def test_publish_many_leaves_stale_references_out(arena: Arena) -> None:
    refs = arena.occupy([*range(3)])
    arena.vacate(1)
    slots, generations = np.array([0, 1, 2]), np.array([ref.generation for ref in refs])
    arena.publish_many(slots, generations, 2, np.array([7, 8, 9], np.uint64))
    assert arena.ready(slots, generations, 2).tolist() == [True, False, True]
    assert arena.checksums(slots, 2).tolist() == [[7], [0], [9]]


@pytest.mark.parametrize("ref", [SlotRef(5, 1000), SlotRef(-1, 1000), SlotRef(0, 999), SlotRef(0, 0)])
def test_a_reference_out_of_range_or_of_another_epoch_is_stale(arena: Arena, ref: SlotRef) -> None:
    assert not arena.is_current(ref)
    assert arena.is_failed(ref)
    assert not arena.publish(ref, 0, 1)
    assert arena.tokens(ref) == 0
    assert arena.state(ref) is SlotState.FREE


def test_a_failed_slot_is_seen_as_failed_by_its_readers(arena: Arena) -> None:
    (ref,) = arena.occupy([4])
    arena.set_tokens(4, 3)
    assert (arena.tokens(ref), arena.state(ref)) == (3, SlotState.FILLING)
    arena.set_state(4, SlotState.FAILED)
    assert arena.is_failed(ref)


def test_a_punched_slot_reads_as_zeros(arena: Arena) -> None:
    arena.segment(3, 0, 4)[:] = b"\xff" * FORMAT.segment_bytes
    arena.segment(2, 0, 4)[:] = b"\xee" * FORMAT.segment_bytes
    arena.punch(3)
    assert set(arena.segment(3, 0, 4)) == {0}
    assert set(arena.segment(2, 0, 4)) == {0xEE}


def test_an_arena_of_another_format_is_refused(arena: Arena) -> None:
    other = PageFormat(layers=3, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=4)
    with pytest.raises(Incompatible):
        Arena.attach(os.dup(arena.fd), other)


def test_a_descriptor_that_is_no_arena_is_refused() -> None:
    for size in (0, 8192):
        fd = os.memfd_create("x")
        os.ftruncate(fd, size)
        with pytest.raises(Malformed):
            Arena.attach(fd, FORMAT)


def test_an_arena_that_somebody_could_shrink_later_is_refused(arena: Arena, tmp_path: Path) -> None:
    size = os.fstat(arena.fd).st_size
    for fd in (os.memfd_create("x", os.MFD_ALLOW_SEALING), os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)):
        os.sendfile(fd, arena.fd, 0, size)
        with pytest.raises(Malformed, match="shrink"):
            Arena.attach(fd, FORMAT)


def test_nobody_can_shrink_an_arena_under_the_others(arena: Arena) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 4096)


def test_a_closed_arena_has_no_current_references_but_old_views_stay_valid(arena: Arena) -> None:
    (ref,) = arena.occupy([0])
    view = arena.segment(0, 0, 4)
    arena.close()
    arena.close()
    view[0] = 1
    assert not arena.is_current(ref)
    assert repr(arena) == "<Arena closed>"


def test_the_status_line_tells_how_many_slots_are_in_use(arena: Arena) -> None:
    arena.occupy([0])
    assert repr(arena) == "<Arena epoch 0x3e8, 1 of 5 slots in use, 4096 bytes each>"


def test_a_layer_is_in_when_all_its_shards_are(arena: Arena) -> None:
    (ref,) = arena.occupy([1])
    where = np.array([ref.slot]), np.array([ref.generation])
    first, second = Shard(0, 2), Shard(1, 2)
    assert arena.publish(ref, 2, 11, first)
    assert [bool(arena.ready(*where, 2, shard)[0]) for shard in (first, second, WHOLE)] == [True, False, False]
    arena.publish_many(*where, 2, np.array([22], np.uint64), second)
    assert [bool(arena.ready(*where, 2, shard)[0]) for shard in (first, second, WHOLE)] == [True, True, True]
    assert arena.ready_layers(*where)[:, 0].tolist() == [False, False, True]
    assert arena.checksums(where[0], 2, 2).tolist() == [[11, 22]]


def test_segments_of_several_shards_are_published_together(arena: Arena) -> None:
    refs = arena.occupy([*range(2)])
    arena.vacate(0)
    slots, generations = np.array([0, 1]), np.array([ref.generation for ref in refs])
    sums = np.array([[1, 2], [3, 4], [5, 6]], np.uint64)
    arena.publish_segments(slots[[0, 1, 1]], generations[[0, 1, 1]], np.array([0, 0, 2]), sums)
    assert arena.ready_layers(slots, generations).T.tolist() == [[False] * 3, [True, False, True]]
    assert arena.checksums(np.array([1, 1]), np.array([0, 2]), 2).tolist() == [[3, 4], [5, 6]]
