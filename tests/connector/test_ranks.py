"""Tensor-parallel engines of unlike sizes exchange pages: a rank writes its own heads and reads the ones it wants."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout, token_slots
from kvrelay.connector.load import LoadResult
from kvrelay.connector.loader import Loader
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob
from kvrelay.connector.saver import StepSaver
from kvrelay.store.arena import Arena
from kvrelay.types import PageFormat, Shard
from tests.connector import caches
from tests.connector.reports import result_of

LAYERS = 2
PAGE = 32
TOKENS = 150
"""Four whole pages and a partial one."""
TABLE = [7, 3, 0, 9, 5]
RANKS = [1, 2, 4]


class Engine:
    """The ranks of one engine: each holds its heads of every layer in blocks of its own order."""

    def __init__(self, ranks: int, kv_heads: int, *, block_tokens: int = 64, wait_s: float = 5.0) -> None:
        self.block_tokens = block_tokens
        self.writers = min(ranks, kv_heads)
        self.heads = [RankHeads.of(rank, ranks, kv_heads) for rank in range(ranks)]
        self.caches = [
            [caches.empty_cache(heads=heads.count, block_tokens=block_tokens) for _ in range(LAYERS)]
            for heads in self.heads
        ]
        writes = [caches.write_dim_major, caches.write_packed]
        self.layouts = [BlockLayout(layers[0], writes[rank % 2]) for rank, layers in enumerate(self.caches)]
        self.loaders = [
            Loader(layers, layout, heads, wait_s=wait_s)
            for layers, layout, heads in zip(self.caches, self.layouts, self.heads, strict=True)
        ]

    def kv(self, kv_heads: int, layer: int) -> list[torch.Tensor]:
        """K and V of the prompt, each ``[token, kv_head, head_dim]``, all heads, from the first rank that has each."""
        whole = [torch.zeros(TOKENS, kv_heads, caches.HEAD_DIM) for _ in range(2)]
        where = token_slots(TABLE, 0, TOKENS, self.block_tokens)
        for heads, layout, layers in zip(self.heads, self.layouts, self.caches, strict=True):
            for target, part in zip(whole, layout.gather(layers[layer], *where), strict=True):
                target[:, heads.first : heads.first + heads.count] = part
        return whole

    def save(self, arena: Arena, pages: list[PageCopy], silent: tuple[int, ...] = ()) -> None:
        for rank, (heads, layout, layers) in enumerate(zip(self.heads, self.layouts, self.caches, strict=True)):
            if heads.shard is not None and rank not in silent:
                saver = StepSaver(arena, layout, [SaveJob("r", TABLE, pages)], heads.shard)
                for layer in range(LAYERS):
                    saver.save(layer, layers[layer])

    def load(self, arena: Arena, pages: list[PageCopy], begin: int = 0) -> list[LoadResult]:
        for loader in self.loaders:
            loader.start(LoadJob("r", TABLE, pages, begin, TOKENS), lambda: arena, arena.epoch)
        return [result_of(loader) for loader in self.loaders]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@pytest.fixture(params=[4, 2])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    page_format = PageFormat(
        layers=LAYERS, kv_heads=request.param, head_dim=caches.HEAD_DIM, dtype="float32", page_tokens=PAGE
    )
    arena = Arena.create(page_format, slots=8, epoch=1000)
    yield arena
    arena.close()


def pages_of(arena: Arena, shards: list[int]) -> list[PageCopy]:
    """Fresh slots for the prompt; ``shards``: writers of each page."""
    pages = []
    for index, start in enumerate(range(0, TOKENS, PAGE)):
        (ref,) = arena.occupy([index + 1])
        count = min(PAGE, TOKENS - start)
        arena.set_tokens(ref.slot, count)
        pages.append(PageCopy(ref.slot, ref.generation, start, count, shards[index]))
    return pages


@pytest.mark.parametrize("readers", RANKS)
@pytest.mark.parametrize("writers", RANKS)
def test_pages_of_any_number_of_ranks_load_into_any_other(arena: Arena, writers: int, readers: int) -> None:
    kv_heads = arena.format.kv_heads
    sender, receiver = Engine(writers, kv_heads), Engine(readers, kv_heads, block_tokens=32)
    for rank in range(1, writers):  # ranks that share a head hold the same bytes
        if sender.heads[rank].shard is None:
            for mine, theirs in zip(sender.caches[rank], sender.caches[rank - 1], strict=True):
                where = token_slots(TABLE, 0, TOKENS, sender.block_tokens)
                slots = where[0] * sender.block_tokens + where[1]
                sender.layouts[rank].scatter(mine, slots, *sender.layouts[rank - 1].gather(theirs, *where))
    pages = pages_of(arena, [sender.writers] * 5)
    sender.save(arena, pages)
    assert [(result.bad_blocks, result.counts) for result in receiver.load(arena, pages)] == [
        (frozenset(), {})
    ] * readers
    for layer in range(LAYERS):
        for ours, theirs in zip(receiver.kv(kv_heads, layer), sender.kv(kv_heads, layer), strict=True):
            assert torch.equal(ours, theirs)
    sender.close()
    receiver.close()


def test_a_load_may_mix_pages_of_unlike_writers(arena: Arena) -> None:
    kv_heads = arena.format.kv_heads
    one, two, receiver = Engine(1, kv_heads), Engine(2, kv_heads), Engine(4, kv_heads)
    pages = pages_of(arena, [1, 2, 1, 2, 2])
    one.save(arena, [page for page in pages if page.shards == 1])
    two.save(arena, [page for page in pages if page.shards == 2])
    assert all(result.bad_blocks == frozenset() for result in receiver.load(arena, pages))
    ours = receiver.kv(kv_heads, 1)[0]
    for page in pages:
        sender = one if page.shards == 1 else two
        part = slice(page.start, page.start + page.tokens)
        assert torch.equal(ours[part], sender.kv(kv_heads, 1)[0][part])
    for engine in (one, two, receiver):
        engine.close()


def test_a_rank_that_writes_nothing_keeps_only_its_readers_waiting(arena: Arena) -> None:
    kv_heads = arena.format.kv_heads
    sender, receiver = Engine(2, kv_heads), Engine(2, kv_heads, wait_s=0.1)
    pages = pages_of(arena, [2] * 5)
    sender.save(arena, pages, silent=(1,))
    assert not arena.ready_layers(np.array([1]), np.array([1000])).any(), "half a page is no page"
    first, second = receiver.load(arena, pages)
    assert first.bad_blocks == frozenset()
    assert second.counts == {"load_stalled": 1}
    assert second.bad_blocks == frozenset(TABLE[:3])
    sender.close()
    receiver.close()


def test_a_flipped_bit_in_one_ranks_run_is_found_by_those_who_read_it(arena: Arena) -> None:
    kv_heads = arena.format.kv_heads
    sender, receiver = Engine(2, kv_heads), Engine(2, kv_heads)
    pages = pages_of(arena, [2] * 5)
    sender.save(arena, pages)
    arena.data[pages[2].slot, arena.format.segment_bytes - 1] ^= 1  # the last head of layer 0
    first, second = receiver.load(arena, pages)
    assert first.counts == {}
    assert second.counts == {"load_bad_checksum": 1}
    assert [ref.slot for ref in second.suspects] == [pages[2].slot]
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("rank", "ranks", "kv_heads", "expected"),
    [
        (0, 1, 4, RankHeads(0, 4, Shard(0, 1))),
        (1, 2, 4, RankHeads(2, 2, Shard(1, 2))),
        (3, 4, 4, RankHeads(3, 1, Shard(3, 4))),
        (0, 4, 2, RankHeads(0, 1, Shard(0, 2))),
        (1, 4, 2, RankHeads(0, 1, None)),
        (2, 4, 2, RankHeads(1, 1, Shard(1, 2))),
        (3, 4, 1, RankHeads(0, 1, None)),
    ],
)
def test_heads_are_dealt_out_as_vllm_does(rank: int, ranks: int, kv_heads: int, expected: RankHeads) -> None:
    assert RankHeads.of(rank, ranks, kv_heads) == expected


@pytest.mark.parametrize(
    ("ranks", "rank", "shards", "runs"),
    [(3, 1, 4, range(1, 3)), (6, 1, 4, range(0, 2)), (12, 5, 1, range(0, 1)), (2, 1, 12, range(6, 12))],
)
def test_the_runs_that_hold_a_ranks_heads_are_read_whole(ranks: int, rank: int, shards: int, runs: range) -> None:
    assert RankHeads.of(rank, ranks, 12).runs(shards, 12) == runs
