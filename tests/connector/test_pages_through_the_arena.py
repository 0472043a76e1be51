"""Saver and loader over a real arena: pages leave one engine's blocks and arrive in another's."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout, token_slots
from kvrelay.connector.load import LoadResult
from kvrelay.connector.loader import Loader
from kvrelay.connector.pace import Pace
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob
from kvrelay.connector.saver import StepSaver
from kvrelay.store.arena import Arena, Bools, Checksums, Ints, SlotState
from kvrelay.types import WHOLE, PageFormat, Shard
from tests.connector import caches
from tests.connector.reports import result_of
from tests.patience import PATIENCE_S

LAYERS = 3
PAGE = 32
FORMAT = PageFormat(layers=LAYERS, kv_heads=caches.HEADS, head_dim=caches.HEAD_DIM, dtype="float32", page_tokens=PAGE)
TABLE = [4, 9, 1]
"""The sender's block table."""


class Receiver:
    """Another engine: its own blocks, its own order inside them, and a loader."""

    def __init__(self, wait_s: float = 0.2) -> None:
        self.layers = [caches.empty_cache() for _ in range(LAYERS)]
        self.before = [layer.clone() for layer in self.layers]
        self.layout = BlockLayout(self.layers[0], caches.write_packed)
        self.loader = Loader(self.layers, self.layout, RankHeads.of(0, 1, caches.HEADS), wait_s=wait_s)
        self.table = [2, 11, 6]

    def load(self, arena: Arena, pages: list[PageCopy], begin: int, end: int, epoch: int | None = None) -> LoadResult:
        job = LoadJob("request", self.table, pages, begin, end)
        self.loader.start(job, lambda: arena, arena.epoch if epoch is None else epoch)
        return self.result()

    def result(self) -> LoadResult:
        return result_of(self.loader)

    def tokens(self, layer: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layout.gather(self.layers[layer], *token_slots(self.table, start, count, caches.BLOCK_TOKENS))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(FORMAT, slots=8, epoch=1000)
    yield arena
    arena.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.loader.close()


SENDER = [caches.empty_cache() for _ in range(LAYERS)]
LAYOUT = BlockLayout(SENDER[0], caches.write_dim_major)


def pages_for(arena: Arena, tokens: int) -> list[PageCopy]:
    """Fresh slots for a prompt of ``tokens`` tokens; the last page may be partial."""
    pages = []
    for index, start in enumerate(range(0, tokens, PAGE)):
        (ref,) = arena.occupy([index + 1])
        count = min(PAGE, tokens - start)
        arena.set_tokens(ref.slot, count)
        pages.append(PageCopy(ref.slot, ref.generation, start, count))
    return pages


def save(arena: Arena, pages: list[PageCopy], layers: int = LAYERS) -> None:
    saver = StepSaver(arena, LAYOUT, [SaveJob("request", TABLE, pages)])
    for layer in range(layers):
        saver.save(layer, SENDER[layer])


def expect_equal(receiver: Receiver, start: int, count: int) -> None:
    for layer in range(LAYERS):
        sent = LAYOUT.gather(SENDER[layer], *token_slots(TABLE, start, count, caches.BLOCK_TOKENS))
        for ours, theirs in zip(receiver.tokens(layer, start, count), sent, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 130])
def test_every_length_arrives_bit_for_bit(arena: Arena, receiver: Receiver, tokens: int) -> None:
    pages = pages_for(arena, tokens)
    save(arena, pages)
    result = receiver.load(arena, pages, 0, tokens)
    assert result.bad_blocks == frozenset()
    expect_equal(receiver, 0, tokens)


def test_only_wanted_positions_are_written(arena: Arena, receiver: Receiver) -> None:
    pages = pages_for(arena, 100)
    save(arena, pages)
    receiver.load(arena, pages[1:], 64, 100)
    expect_equal(receiver, 64, 36)
    for layer in range(LAYERS):
        first_block = receiver.table[0]
        assert torch.equal(receiver.layers[layer][first_block], receiver.before[layer][first_block])


def test_a_load_that_begins_inside_a_page_skips_the_tokens_before(arena: Arena, receiver: Receiver) -> None:
    pages = pages_for(arena, 64)
    save(arena, pages)
    receiver.load(arena, pages, 16, 64)
    expect_equal(receiver, 16, 48)
    untouched = receiver.layout.gather(receiver.before[0], *token_slots(receiver.table, 0, 16, caches.BLOCK_TOKENS))
    assert torch.equal(receiver.tokens(0, 0, 16)[0], untouched[0])


def test_a_partial_page_holds_no_byte_of_the_rest_of_its_block(arena: Arena) -> None:
    pages = pages_for(arena, 5)
    arena.data[pages[0].slot] = 0
    save(arena, pages)
    for layer in range(LAYERS):
        start = layer * FORMAT.segment_bytes + 5 * FORMAT.token_layer_bytes
        assert not arena.data[pages[0].slot, start : (layer + 1) * FORMAT.segment_bytes].any()


def test_a_load_is_begun_at_once_though_another_one_waits_for_layers(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = threading.Event()

    def for_ever(_pace: Pace, _looked_s: float) -> float:
        rests.set()
        return 3600.0

    monkeypatch.setattr("kvrelay.connector.pace.Pace.pause_s", for_ever)
    receiver, silent = Receiver(wait_s=3600), arena.occupy([7])[0]
    waiting = [PageCopy(silent.slot, silent.generation, 0, PAGE)]
    receiver.loader.start(LoadJob("waiting", [3], waiting, 0, PAGE), lambda: arena, arena.epoch)
    assert rests.wait(PATIENCE_S)
    pages = pages_for(arena, 70)
    save(arena, pages)
    assert receiver.load(arena, pages, 0, 70).bad_blocks == frozenset()
    receiver.loader.close()


def test_layers_are_loaded_as_they_arrive(arena: Arena) -> None:
    receiver = Receiver(wait_s=PATIENCE_S)
    pages = pages_for(arena, 70)
    job = LoadJob("request", receiver.table, pages, 0, 70)
    receiver.loader.start(job, lambda: arena, arena.epoch)
    saver = StepSaver(arena, LAYOUT, [SaveJob("request", TABLE, pages)])
    for layer in range(LAYERS):
        assert receiver.loader.collect() == []
        saver.save(layer, SENDER[layer])
        time.sleep(0.01)
    assert receiver.result().bad_blocks == frozenset()
    expect_equal(receiver, 0, 70)
    receiver.loader.close()


def test_while_nothing_comes_a_load_looks_at_one_mark_and_rarely_at_all(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    often = threading.Event()
    ready, is_marked = arena.ready, arena.is_marked

    def look_at_all(slots: Ints, generations: Ints, layer: int, shard: Shard = WHOLE) -> Bools:
        looks.append("all")
        return ready(slots, generations, layer, shard)

    def look_at_one(slot: int, generation: int, layer: int, head: int) -> bool:
        looks.append("one")
        if looks.count("one") == 20:
            often.set()
        return is_marked(slot, generation, layer, head)

    monkeypatch.setattr(arena, "ready", look_at_all)
    monkeypatch.setattr(arena, "is_marked", look_at_one)
    monkeypatch.setattr("kvrelay.connector.load.FULL_LOOK_S", 60.0)
    receiver = Receiver(wait_s=60)
    pages = pages_for(arena, 70)
    save(arena, pages[:2])
    receiver.loader.start(LoadJob("request", receiver.table, pages, 0, 70), lambda: arena, arena.epoch)
    assert often.wait(PATIENCE_S)
    assert looks.count("all") <= 3
    save(arena, pages)
    assert receiver.result().bad_blocks == frozenset()
    expect_equal(receiver, 0, 70)
    receiver.loader.close()


def test_a_load_that_waits_for_its_last_page_notices_that_an_earlier_one_is_lost(arena: Arena) -> None:
    receiver = Receiver(wait_s=60)
    pages = pages_for(arena, 70)
    save(arena, pages[:1])
    receiver.loader.start(LoadJob("request", receiver.table, pages, 0, 70), lambda: arena, arena.epoch)
    arena.set_state(pages[1].slot, SlotState.FAILED)
    result = receiver.result()
    assert result.counts == {"load_page_lost": 1}
    expect_equal(receiver, 0, PAGE)
    receiver.loader.close()


def test_a_waiting_load_does_not_hold_up_a_ready_one(arena: Arena) -> None:
    receiver = Receiver(wait_s=PATIENCE_S)
    pages = pages_for(arena, 100)
    save(arena, pages[1:])
    receiver.loader.start(LoadJob("waits", [2], pages[:1], 0, 32), lambda: arena, arena.epoch)
    receiver.loader.start(LoadJob("ready", [0, 1], pages[1:2], 32, 64), lambda: arena, arena.epoch)
    assert receiver.result().request_id == "ready"
    receiver.loader.close()


def flip_bit(arena: Arena, page: PageCopy) -> None:
    arena.data[page.slot, FORMAT.segment_bytes + 3] ^= 1


def reuse_slot(arena: Arena, page: PageCopy) -> None:
    arena.vacate(page.slot)
    arena.occupy([page.slot])


def fail_writer(arena: Arena, page: PageCopy) -> None:
    arena._ready[page.slot, 1] = 0
    arena.set_state(page.slot, SlotState.FAILED)


def stop_writer(arena: Arena, page: PageCopy) -> None:
    arena._ready[page.slot, 2] = 0


@pytest.mark.parametrize(
    ("damage", "count"),
    [
        (flip_bit, "load_bad_checksum"),
        (reuse_slot, "load_page_lost"),
        (fail_writer, "load_page_lost"),
        (stop_writer, "load_stalled"),
    ],
)
def test_from_a_damaged_page_on_the_engine_computes_itself(
    arena: Arena, receiver: Receiver, damage: object, count: str
) -> None:
    pages = pages_for(arena, 150)
    save(arena, pages)
    damage(arena, pages[2])  # type: ignore[operator]
    result = receiver.load(arena, pages, 0, 150)
    assert result.counts == {count: 1}
    assert result.bad_blocks == frozenset(receiver.table[1:])
    assert len(result.suspects) == (1 if damage is flip_bit else 0)
    expect_equal(receiver, 0, 64)


@pytest.mark.parametrize("slot", [-1, 1 << 30])
def test_a_slot_that_the_arena_does_not_have_is_a_miss(arena: Arena, receiver: Receiver, slot: int) -> None:
    pages = pages_for(arena, 150)
    save(arena, pages)
    pages[2] = dataclasses.replace(pages[2], slot=slot)
    result = receiver.load(arena, pages, 0, 150)
    assert result.counts == {"load_page_lost": 1}
    assert result.bad_blocks == frozenset(receiver.table[1:])
    expect_equal(receiver, 0, 64)


def test_a_slot_reused_between_check_and_copy_is_a_miss(arena: Arena, receiver: Receiver) -> None:
    """The bytes of the new page match their own checksum; only the generation tells."""
    pages = pages_for(arena, 32)
    save(arena, pages)
    checksums = arena.checksums

    def reuse_then_read(slots: Ints, layer: int, shards: int) -> Checksums:
        expected = checksums(slots, layer, shards)
        arena.vacate(pages[0].slot)
        return expected

    arena.checksums = reuse_then_read  # type: ignore[assignment, method-assign]
    result = receiver.load(arena, pages, 0, 32)
    assert result.counts == {"load_slot_reused": 1}
    assert result.bad_blocks == frozenset(receiver.table[:1])


def test_a_load_for_another_epoch_touches_nothing(arena: Arena, receiver: Receiver) -> None:
    pages = pages_for(arena, 64)
    save(arena, pages)
    result = receiver.load(arena, pages, 0, 64, epoch=arena.epoch + 1)
    assert result.counts == {"load_wrong_epoch": 1}
    assert result.bad_blocks == frozenset(receiver.table[:1])
    assert all(torch.equal(now, then) for now, then in zip(receiver.layers, receiver.before, strict=True))


def test_a_cancelled_load_is_reported_once_and_soon(arena: Arena) -> None:
    receiver = Receiver(wait_s=30)
    receiver.loader.start(LoadJob("request", receiver.table, pages_for(arena, 64), 0, 64), lambda: arena, arena.epoch)
    receiver.loader.cancel("request")
    receiver.loader.cancel("never heard of")
    assert receiver.result().counts == {"load_cancelled": 1}
    receiver.loader.cancel("request")
    receiver.loader.close()


def test_a_stale_slot_is_not_written(arena: Arena) -> None:
    pages = pages_for(arena, 32)
    reuse_slot(arena, pages[0])
    before = arena.data.copy()
    save(arena, pages)
    assert np.array_equal(arena.data, before)


@pytest.mark.parametrize("tokens", [32, 20])
def test_a_slot_taken_away_in_the_middle_of_a_forward_is_written_no_further(arena: Arena, tokens: int) -> None:
    pages = pages_for(arena, tokens)
    saver = StepSaver(arena, LAYOUT, [SaveJob("request", TABLE, pages)])
    saver.save(0, SENDER[0])
    reuse_slot(arena, pages[0])
    before = arena.data.copy()
    saver.save(1, SENDER[1])
    assert np.array_equal(arena.data, before)


def test_a_checksum_is_of_what_was_meant_to_be_written(arena: Arena, receiver: Receiver) -> None:
    """Two writers in one slot: the later bytes are not those that the checksum vouches for."""
    pages = pages_for(arena, 32)
    publish = arena.publish_many

    def scribble_then_publish(
        slots: Ints, generations: Ints, layer: int, checksums: Checksums, shard: Shard = WHOLE
    ) -> None:
        arena.data[pages[0].slot, 7] ^= 1
        publish(slots, generations, layer, checksums, shard)

    arena.publish_many = scribble_then_publish  # type: ignore[method-assign]
    save(arena, pages)
    assert receiver.load(arena, pages, 0, 32).counts == {"load_bad_checksum": 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loader_that_dies_reports_every_load(arena: Arena) -> None:
    receiver = Receiver()
    pages = pages_for(arena, 32)

    def broken() -> float:
        raise RuntimeError("planted")

    receiver.loader._clock = broken
    receiver.loader.start(LoadJob("breaks it", receiver.table, pages, 0, 32), lambda: arena, arena.epoch)
    assert receiver.result().request_id == "breaks it"
    receiver.loader.start(LoadJob("comes later", receiver.table, pages, 0, 32), lambda: arena, arena.epoch)
    assert receiver.result().counts == {"load_crashed": 1}
    receiver.loader.close()
