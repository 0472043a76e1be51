"""How often pending loads look at the arena, and what they make of what they see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout
from kvrelay.connector.load import Load
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob
from kvrelay.connector.saver import StepSaver
from kvrelay.connector.staging import Staging
from kvrelay.store.arena import Arena, Bools, Ints
from kvrelay.types import WHOLE, PageFormat, Shard, SlotRef
from tests.connector import caches

FORMAT = PageFormat(
    layers=1, kv_heads=caches.HEADS, head_dim=caches.HEAD_DIM, dtype="float32", page_tokens=caches.BLOCK_TOKENS
)


class WatchedArena(Arena):
    """Something happens after each look at its marks."""

    looked: Callable[[], None] = staticmethod(lambda: None)

    def ready(self, slots: Ints, generations: Ints, layer: int | Ints, shard: Shard = WHOLE) -> Bools:
        seen = super().ready(slots, generations, layer, shard)
        self.looked()
        return seen


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_mark_that_comes_between_two_looks_costs_no_page_that_is_in(looks: int) -> None:
    arena = WatchedArena.create(FORMAT, slots=2, epoch=1)
    pages, cache, left = _pages(arena), caches.empty_cache(), iter(range(looks))
    layout = BlockLayout(cache, caches.write_dim_major)

    def save(page: PageCopy) -> None:
        StepSaver(arena, layout, [SaveJob("r", [0, 1], [page])]).save(0, cache)

    def looked() -> None:
        if next(left, None) == looks - 1:
            save(pages[1])

    save(pages[0])
    job = LoadJob("r", [0, 1], pages, 0, 2 * FORMAT.page_tokens)
    load = Load(job, arena, layout, [cache], RankHeads.of(0, 1, caches.HEADS), 0.0)
    assert not load.advance(0.0, 1.0)
    assert isinstance(arena, WatchedArena)
    arena.looked = looked
    load.advance(10.0, 1.0)  # what has not come by now is given up
    assert load.usable >= 1
    assert load.counts in ({}, {"load_stalled": 1})
    arena.close()


def test_a_page_is_looked_for_by_a_mark_of_its_own_writers() -> None:
    arena = Arena.create(FORMAT, slots=2, epoch=1)
    whole, shared = _pages(arena)
    shared = PageCopy(shared.slot, shared.generation, shared.start, shared.tokens, shards=caches.HEADS)
    last = caches.HEADS - 1
    staging = Staging(arena, [whole, shared], RankHeads.of(last, caches.HEADS, caches.HEADS))
    assert not staging.may_be_in(1, 0)
    for head in range(last):
        arena.publish(_ref(shared), 0, 0, Shard(head, caches.HEADS))
    assert not staging.may_be_in(1, 0), "those are of ranks that this one reads nothing of"
    arena.publish(_ref(shared), 0, 0, Shard(last, caches.HEADS))
    assert staging.may_be_in(1, 0)
    arena.publish(_ref(whole), 0, 0)
    assert staging.may_be_in(0, 0)
    arena.close()


def _pages(arena: Arena) -> list[PageCopy]:
    size = FORMAT.page_tokens
    refs = arena.occupy([0, 1])
    arena.set_tokens([0, 1], size)
    return [PageCopy(ref.slot, ref.generation, index * size, size) for index, ref in enumerate(refs)]


def _ref(page: PageCopy) -> SlotRef:
    return SlotRef(page.slot, page.generation)
