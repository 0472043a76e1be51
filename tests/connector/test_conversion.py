"""An engine loads pages of another KV type: what it gets is the nearest that its own type can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch

from kvrelay.connector.arenas import Absent, Arenas
from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout, token_slots
from kvrelay.connector.loader import Loader
from kvrelay.connector.mover import HostMover
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob, StepPlan
from kvrelay.connector.saver import StepSaver
from kvrelay.connector.worker import WorkerHalf
from kvrelay.store.arena import Arena
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, SlotRef
from tests.connector import caches
from tests.connector.reports import result_of
from tests.patience import wait_until

TOKENS, PAGE = 70, 32
TABLE = [3, 1]
WAIT_S = 1.0
TYPES = [torch.float32, torch.bfloat16]


def format_of(dtype: torch.dtype) -> PageFormat:
    name = str(dtype).removeprefix("torch.")
    return PageFormat(layers=1, kv_heads=caches.HEADS, head_dim=caches.HEAD_DIM, dtype=name, page_tokens=PAGE)


class Attached:
    """A client whose arena is mapped once ``ready``."""

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self.closed = False
        self.suspected: list[SlotRef] = []

    def close(self) -> None:
        self.closed = True

    def suspect(self, slots: Sequence[SlotRef]) -> None:
        self.suspected += slots

    def report(self, counts: dict[str, int]) -> None: ...


@pytest.fixture(params=TYPES, ids=["float32", "bfloat16"])
def sender(request: pytest.FixtureRequest) -> Iterator[tuple[Arena, list[PageCopy], torch.Tensor]]:
    """An arena with a prompt's pages of one type, and the blocks that they came from."""
    arena = Arena.create(format_of(request.param), slots=4, epoch=1000)
    cache = caches.empty_cache(dtype=request.param)
    pages = []
    for index, start in enumerate(range(0, TOKENS, PAGE)):
        (ref,) = arena.occupy([index])
        pages.append(PageCopy(ref.slot, ref.generation, start, min(PAGE, TOKENS - start)))
        arena.set_tokens(ref.slot, pages[-1].tokens)
    StepSaver(arena, BlockLayout(cache, caches.write_dim_major), [SaveJob("r", TABLE, pages)]).save(0, cache)
    yield arena, pages, cache
    arena.close()


@pytest.mark.parametrize("own", TYPES, ids=["into-float32", "into-bfloat16"])
def test_a_loaded_element_is_the_nearest_of_the_engines_type(
    sender: tuple[Arena, list[PageCopy], torch.Tensor], own: torch.dtype
) -> None:
    arena, pages, sent = sender
    cache = caches.empty_cache(dtype=own)
    layout = BlockLayout(cache, caches.write_packed)
    mover = HostMover(layout, lambda: None)
    loader = Loader([cache], mover, RankHeads.of(0, 1, caches.HEADS), wait_s=1.0)
    job = LoadJob("r", TABLE, pages, 0, TOKENS, arena.format)
    loader.start(job, lambda: arena, arena.epoch)
    assert result_of(loader).counts == {}
    loader.close()
    where = token_slots(TABLE, 0, TOKENS, caches.BLOCK_TOKENS)
    came_from = BlockLayout(sent, caches.write_dim_major)
    for ours, theirs in zip(layout.gather(cache, *where), came_from.gather(sent, *where), strict=True):
        assert torch.equal(ours, theirs.to(own))


def test_a_damaged_page_of_another_type_is_told_to_the_store_by_its_own_arena(
    sender: tuple[Arena, list[PageCopy], torch.Tensor],
) -> None:
    arena, pages, sent = sender
    arena.data[pages[1].slot, 0] ^= 1
    own, other = Attached(arena), Attached(arena)
    heads = RankHeads.of(0, 1, caches.HEADS)
    mover = HostMover(BlockLayout(sent, caches.write_dim_major), lambda: None)
    half = WorkerHalf(
        cast(StoreClient, own),
        {"layer.0": sent},
        mover,
        heads,
        load_wait_s=1.0,
        connect=lambda page_format: cast(StoreClient, other),
    )
    half.before_step(StepPlan(epoch=arena.epoch, loads=[LoadJob("r", TABLE, pages, 0, TOKENS, arena.format)]))
    wait_until(half.collect)
    half.close()
    assert (own.suspected, [ref.slot for ref in other.suspected]) == ([], [pages[1].slot])


def test_another_formats_arena_is_attached_once_and_closed_with_the_rest() -> None:
    own, other = format_of(torch.bfloat16), format_of(torch.float32)
    mine, theirs = (Arena.create(page_format, slots=1, epoch=1) for page_format in (own, other))
    asked, client = [], Attached(theirs)

    def connect(page_format: PageFormat) -> StoreClient:
        asked.append(page_format)
        return cast(StoreClient, client)

    arenas = Arenas(cast(StoreClient, Attached(mine)), connect)
    assert arenas.of(None)() is mine
    assert [arenas.of(other)(), arenas.of(other)()] == [theirs, theirs]
    assert asked == [other]
    arenas.close()
    assert client.closed
    mine.close()
    theirs.close()


class Clock:
    """Stands still unless it is told to go on, also between two looks of one thread."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loader(clock: Clock) -> Iterator[Loader]:
    cache = caches.empty_cache()
    mover = HostMover(BlockLayout(cache, caches.write_packed), lambda: None)
    loader = Loader([cache], mover, RankHeads.of(0, 1, caches.HEADS), wait_s=WAIT_S, clock=clock)
    yield loader
    loader.close()


def test_an_arena_that_cannot_be_attached_ends_the_load_and_not_the_loader(loader: Loader, clock: Clock) -> None:
    away = Arenas(cast(StoreClient, Attached(None)), lambda page_format: cast(StoreClient, Attached(None)))
    job = LoadJob("r", TABLE, [PageCopy(0, 1, 0, PAGE)], 0, PAGE, format_of(torch.bfloat16))
    looks = []

    def find() -> Arena | Absent:
        looks.append(found := away.of(job.format)())
        return found

    loader.start(job, find, 1)
    wait_until(lambda: len(looks) > 2)
    assert loader.collect() == []
    clock.now = WAIT_S
    result = result_of(loader)
    assert (result.counts, result.bad_blocks) == ({"load_no_arena": 1}, frozenset(TABLE[:1]))


def test_the_time_for_an_attachment_counts_from_the_first_look(
    loader: Loader, clock: Clock, sender: tuple[Arena, list[PageCopy], torch.Tensor]
) -> None:
    arena, pages, _ = sender
    client = Attached(None)
    find = Arenas(cast(StoreClient, Attached(None)), lambda page_format: cast(StoreClient, client)).of(arena.format)
    clock.now = 10 * WAIT_S  # the loader's thread had no core for so long
    looks = []

    def look() -> Arena | Absent:
        looks.append(found := find())
        return found

    loader.start(LoadJob("r", TABLE, pages, 0, TOKENS, arena.format), look, arena.epoch)
    wait_until(lambda: len(looks) > 2)
    client.arena = arena
    assert result_of(loader).counts == {}


def test_a_load_whose_arena_is_being_attached_holds_up_no_other(
    loader: Loader, sender: tuple[Arena, list[PageCopy], torch.Tensor]
) -> None:
    arena, pages, _ = sender
    seen: list[Arena | Absent] = [Absent.ATTACHING]
    first, second = (LoadJob(name, TABLE, pages, 0, TOKENS, arena.format) for name in ("first", "second"))
    loader.start(first, lambda: seen[-1], arena.epoch)
    loader.start(second, lambda: arena, arena.epoch)
    assert (result_of(loader).request_id, seen) == ("second", [Absent.ATTACHING])
    seen.append(arena)
    result = result_of(loader)
    assert (result.request_id, result.counts) == ("first", {})


def test_a_load_that_cannot_begin_is_counted_and_costs_the_others_nothing(
    loader: Loader, sender: tuple[Arena, list[PageCopy], torch.Tensor]
) -> None:
    arena, pages, _ = sender

    def broken() -> Arena:
        raise RuntimeError("planted")

    loader.start(LoadJob("unfound", TABLE, pages, 0, TOKENS, arena.format), broken, arena.epoch)
    unfound = result_of(loader)
    loader.start(LoadJob("empty", TABLE, [], 0, TOKENS, arena.format), lambda: arena, arena.epoch)
    empty = result_of(loader)
    loader.start(LoadJob("good", TABLE, pages, 0, TOKENS, arena.format), lambda: arena, arena.epoch)
    assert (unfound.counts, unfound.bad_blocks) == ({"load_crashed": 1}, frozenset(TABLE))
    assert (empty.counts, empty.bad_blocks) == ({"load_crashed": 1}, frozenset(TABLE))
    assert result_of(loader).counts == {}
