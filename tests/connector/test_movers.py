"""What every mover must do, whatever memory an engine's blocks are in: on the host, on a simulated device whose queues
run in the worst order that is allowed, and on a GPU where there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout
from kvrelay.connector.loader import Loader
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob, StepPlan
from kvrelay.connector.saver import canonical
from kvrelay.connector.worker import WorkerHalf
from kvrelay.store.arena import Arena
from kvrelay.store.client import StoreClient
from kvrelay.store.copying import read_page, write_page
from kvrelay.types import PageFormat, SlotRef
from tests.connector import caches, movers
from tests.connector.movers import LAYERS, EngineBench
from tests.connector.reports import result_of
from tests.connector.sim_device import Schedule
from tests.connector.test_worker import no_other
from tests.patience import PATIENCE_S

PAGE = 32
FORMAT = PageFormat(layers=LAYERS, kv_heads=caches.HEADS, head_dim=caches.HEAD_DIM, dtype="float32", page_tokens=PAGE)
TABLE = [4, 9]
OTHER_TABLE = [7, 2]
TOKENS = 3 * PAGE + 20
"""Three whole pages and a partial one."""

Prompt = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, ``[TOKENS, kv_head, head_dim]``."""

KINDS: dict[str, Callable[[], EngineBench]] = {
    "host": movers.on_host,
    **{
        f"sim {schedule} {order}": functools.partial(movers.on_sim, schedule, order)
        for schedule in (Schedule.AT_ONCE, Schedule.LATE, Schedule.EARLY)
        for order in ("NHD", "HND")
    },
    **{f"sim shuffled {seed}": functools.partial(movers.on_sim, Schedule.SHUFFLED, "NHD", seed) for seed in range(20)},
    "cuda NHD": functools.partial(movers.on_cuda, "NHD"),
    "cuda HND": functools.partial(movers.on_cuda, "HND"),
}


@pytest.fixture(
    params=[pytest.param(kind, marks=[pytest.mark.gpu] if "cuda" in kind else []) for kind in KINDS],
)
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    bench = KINDS[request.param]()
    yield bench
    bench.mover.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(FORMAT, slots=8, epoch=1000)
    yield arena
    arena.close()


def prompt(seed: int) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    shape = (TOKENS, caches.HEADS, caches.HEAD_DIM)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _layer in range(LAYERS)
    ]


def pages(arena: Arena, first_slot: int = 0) -> list[PageCopy]:
    copies = []
    for index, start in enumerate(range(0, TOKENS, PAGE)):
        (ref,) = arena.occupy([first_slot + index])
        copies.append(PageCopy(ref.slot, ref.generation, start, min(PAGE, TOKENS - start)))
    return copies


def payload(written: Prompt, page: PageCopy) -> bytes:
    """The page's bytes, all layers, in canonical order."""
    part = slice(page.start, page.start + page.tokens)
    return b"".join(canonical(key[part], value[part], 1).numpy().tobytes() for key, value in written)


def compute_and_save(bench: EngineBench, arena: Arena, copies: list[PageCopy], written: Prompt) -> None:
    """One step: each layer is computed and saved, as the engine's hooks do."""
    saver = bench.mover.open(arena, [SaveJob("request", TABLE, copies)])
    for layer, (key, value) in enumerate(written):
        bench.write(layer, TABLE, key, value)
        assert bench.mover.save(saver, layer, bench.layers[layer])


def wait_published(bench: EngineBench, layers: int = LAYERS) -> None:
    bench.go()
    for _layer in range(layers):
        assert bench.published.acquire(timeout=PATIENCE_S), (bench.mover, bench.counts)


def saved(arena: Arena, page: PageCopy) -> bytes | None:
    return read_page(arena, SlotRef(page.slot, page.generation), page.tokens)


def load(bench: EngineBench, arena: Arena, copies: list[PageCopy], table: list[int]) -> None:
    """Load all of the prompt by the loader's own thread, and wait for its report."""
    loader = Loader(bench.layers, bench.mover, RankHeads.of(0, 1, caches.HEADS), wait_s=5.0)
    bench.go()
    loader.start(LoadJob("request", table, copies, 0, TOKENS), lambda: arena, arena.epoch)
    try:
        assert not result_of(loader).bad_blocks
    finally:
        loader.close()


def arrived(arena: Arena, written: Prompt, first_slot: int = 0) -> list[PageCopy]:
    """Pages that another engine left in the arena."""
    copies = pages(arena, first_slot)
    for page in copies:
        write_page(arena, SlotRef(page.slot, page.generation), payload(written, page), page.tokens)
    return copies


# ---------------------------------------------------------------- the suite


def test_pages_hold_what_the_engine_computed(bench: EngineBench, arena: Arena) -> None:
    copies, written = pages(arena), prompt(1)
    compute_and_save(bench, arena, copies, written)
    wait_published(bench)
    assert [saved(arena, page) for page in copies] == [payload(written, page) for page in copies]


def test_what_the_next_step_writes_to_the_blocks_is_in_no_page(bench: EngineBench, arena: Arena) -> None:
    copies, written = pages(arena), prompt(1)
    compute_and_save(bench, arena, copies, written)
    bench.mover.fence()
    for layer, (key, value) in enumerate(prompt(2)):
        bench.write(layer, TABLE, key, value)
    wait_published(bench)
    assert [saved(arena, page) for page in copies] == [payload(written, page) for page in copies]


def test_a_late_save_comes_before_the_step_that_follows_it(bench: EngineBench, arena: Arena) -> None:
    copies, written = pages(arena), prompt(1)
    for layer, (key, value) in enumerate(written):
        bench.write(layer, TABLE, key, value)
    bench.mover.fence()
    saver = bench.mover.open(arena, [SaveJob("ended", TABLE, copies)])
    for layer in range(LAYERS):
        assert bench.mover.save(saver, layer, bench.layers[layer])
    bench.mover.fence()
    for layer, (key, value) in enumerate(prompt(2)):
        bench.write(layer, TABLE, key, value)
    wait_published(bench)
    assert [saved(arena, page) for page in copies] == [payload(written, page) for page in copies]


def test_a_step_finds_what_was_loaded_and_nothing_else_changed(bench: EngineBench, arena: Arena) -> None:
    there, written = prompt(3), prompt(1)
    for layer, (key, value) in enumerate(there):
        bench.write(layer, OTHER_TABLE, key, value)
    bench.mover.fence()
    load(bench, arena, arrived(arena, written), TABLE)
    for layer in range(LAYERS):
        for table, expected in ((TABLE, written[layer]), (OTHER_TABLE, there[layer])):
            found = bench.read(layer, table, TOKENS)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


def test_a_load_comes_after_what_the_engine_did_to_its_blocks(bench: EngineBench, arena: Arena) -> None:
    written = prompt(1)
    for layer, (key, value) in enumerate(prompt(2)):
        bench.write(layer, TABLE, key, value)
    bench.mover.fence()
    load(bench, arena, arrived(arena, written), TABLE)
    for layer in range(LAYERS):
        key, value = bench.read(layer, TABLE, TOKENS)
        assert torch.equal(key, written[layer][0])
        assert torch.equal(value, written[layer][1])


def test_a_load_into_freed_blocks_is_in_no_page_of_their_last_owner(bench: EngineBench, arena: Arena) -> None:
    copies, written = pages(arena), prompt(1)
    compute_and_save(bench, arena, copies, written)
    bench.mover.fence()
    load(bench, arena, arrived(arena, prompt(2), first_slot=4), TABLE)
    wait_published(bench)
    assert [saved(arena, page) for page in copies] == [payload(written, page) for page in copies]


def test_a_slot_that_was_given_away_meanwhile_is_not_published(bench: EngineBench, arena: Arena) -> None:
    copies, written = pages(arena), prompt(1)
    saver = bench.mover.open(arena, [SaveJob("request", TABLE, copies)])
    lost = (copies[1], copies[3])
    for page in lost:
        arena.vacate(page.slot)
    for layer, (key, value) in enumerate(written):
        bench.write(layer, TABLE, key, value)
        assert bench.mover.save(saver, layer, bench.layers[layer])
    wait_published(bench)
    expected = [None if page in lost else payload(written, page) for page in copies]
    assert [saved(arena, page) for page in copies] == expected


def test_pages_pass_to_an_engine_with_other_memory_and_back(bench: EngineBench, arena: Arena) -> None:
    copies, written = pages(arena), prompt(1)
    compute_and_save(bench, arena, copies, written)
    wait_published(bench)
    other = movers.on_host()
    load(other, arena, copies, OTHER_TABLE)
    for layer in range(LAYERS):
        key, value = other.read(layer, OTHER_TABLE, TOKENS)
        assert torch.equal(key, written[layer][0])
        assert torch.equal(value, written[layer][1])
    assert isinstance(other.layout, BlockLayout)


# ---------------------------------------------------------------- the worker half around it


class AttachedClient:
    """A store client that has ``arena`` mapped."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def report(self, counts: dict[str, int]) -> None:
        raise AssertionError(counts)


@pytest.mark.parametrize("late", [False, True])
def test_the_worker_half_keeps_the_order_between_steps(bench: EngineBench, arena: Arena, late: bool) -> None:
    copies, written = pages(arena), prompt(1)
    caches_by_name = {f"layer.{index}": layer for index, layer in enumerate(bench.layers)}
    client = cast(StoreClient, AttachedClient(arena))
    half = WorkerHalf(
        client, caches_by_name, bench.mover, RankHeads.of(0, 1, caches.HEADS), load_wait_s=5.0, connect=no_other
    )
    jobs = [SaveJob("request", TABLE, copies)]
    computing = StepPlan(epoch=arena.epoch, saves=[] if late else jobs)
    following = StepPlan(epoch=arena.epoch, late_saves=jobs if late else [])
    for plan, values in ((computing, written), (following, prompt(2))):
        half.before_step(plan)
        for layer, (key, value) in enumerate(values):
            bench.write(layer, TABLE, key, value)
            half.save_layer(f"layer.{layer}")
        half.after_step()
    wait_published(bench)
    assert [saved(arena, page) for page in copies] == [payload(written, page) for page in copies]
    half.close()
