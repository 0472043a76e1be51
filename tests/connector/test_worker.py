from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import BlockLayout
from kvrelay.connector.mover import HostMover
from kvrelay.connector.plan import LoadJob, PageCopy, SaveJob, StepPlan
from kvrelay.connector.saver import StepSaver
from kvrelay.connector.worker import WorkerHalf
from kvrelay.store.arena import Arena
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, SlotRef
from tests.connector import caches
from tests.patience import wait_until

FORMAT = PageFormat(layers=2, kv_heads=caches.HEADS, head_dim=caches.HEAD_DIM, dtype="float32", page_tokens=32)


class Client:
    """An attached client that counts."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.counts: dict[str, int] = {}
        self.suspected: list[SlotRef] = []

    def suspect(self, slots: Sequence[SlotRef]) -> None:
        self.suspected += slots

    def ring(self) -> None: ...

    def report(self, counts: dict[str, int]) -> None:
        self.counts |= counts


def no_other(format: PageFormat) -> StoreClient:
    raise AssertionError("no page of another format is loaded here")


@pytest.fixture
def worker() -> Iterator[tuple[WorkerHalf, Client]]:
    arena = Arena.create(FORMAT, slots=4, epoch=1000)
    client = Client(arena)
    layers: dict[str, torch.Tensor] = {f"layer.{i}": caches.empty_cache() for i in range(FORMAT.layers)}
    heads = RankHeads.of(0, 1, caches.HEADS)
    mover = HostMover(BlockLayout(layers["layer.0"], caches.write_dim_major), client.ring)
    half = WorkerHalf(cast(StoreClient, client), layers, mover, heads, load_wait_s=1.0, connect=no_other)
    yield half, client
    half.close()
    arena.close()


def plan_for(arena: Arena, blocks: list[int], *, late: bool, epoch: int | None = None) -> StepPlan:
    (ref,) = arena.occupy([1])
    jobs = [SaveJob("r", blocks, [PageCopy(ref.slot, ref.generation, 0, 32)])]
    plan = StepPlan(epoch=arena.epoch if epoch is None else epoch)
    (plan.late_saves if late else plan.saves).extend(jobs)
    return plan


def run_step(half: WorkerHalf, plan: StepPlan) -> None:
    half.before_step(plan)
    for layer in range(FORMAT.layers):
        half.save_layer(f"layer.{layer}")
    half.after_step()


@pytest.mark.parametrize("late", [False, True])
def test_a_step_saves_all_layers(worker: tuple[WorkerHalf, Client], late: bool) -> None:
    half, client = worker
    run_step(half, plan_for(client.arena, [3], late=late))
    assert client.arena.ready_layers(np.array([1]), np.array([client.arena.epoch])).all()
    assert (client.counts, client.suspected) == ({}, [])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("blocks", [[], [10_000]])
def test_a_save_that_cannot_work_is_counted_and_stops_no_forward(
    worker: tuple[WorkerHalf, Client], blocks: list[int], late: bool
) -> None:
    half, client = worker
    run_step(half, plan_for(client.arena, blocks, late=late))
    assert client.counts == {"saves_crashed": 1}
    assert [ref.slot for ref in client.suspected] == [1], "the engine may have no further step to find out in"
    assert not client.arena.ready_layers(np.array([1]), np.array([client.arena.epoch])).any()


@pytest.mark.parametrize("least_bytes", [FORMAT.page_bytes, FORMAT.page_bytes + 1])
def test_loads_that_are_large_enough_tell_how_fast_they_were(
    worker: tuple[WorkerHalf, Client], least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.connector.worker.MIN_RESTORED_BYTES", least_bytes)
    half, client = worker
    saved = plan_for(client.arena, [3], late=False)
    run_step(half, saved)
    plan = StepPlan(epoch=client.arena.epoch, loads=[LoadJob("r", [4], saved.saves[0].pages, 0, 32)])
    half.before_step(plan)
    wait_until(lambda: half.collect() == {"r"})
    assert half.take_bad_blocks() == set()
    if least_bytes > FORMAT.page_bytes:
        assert client.counts == {}
    else:
        assert client.counts["restored_bytes"] == FORMAT.page_bytes
        assert client.counts["restore_us"] > 0


def test_a_plan_for_another_arena_writes_nothing(worker: tuple[WorkerHalf, Client]) -> None:
    half, client = worker
    before = client.arena.data.copy()
    run_step(half, plan_for(client.arena, [3], late=False, epoch=7))
    assert client.counts == {"saves_wrong_epoch": 1}
    assert [ref.slot for ref in client.suspected] == [1]
    assert (client.arena.data == before).all()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("is_behind", [False, True], ids=["crashes", "is behind"])
def test_pages_whose_save_ends_in_the_middle_are_told_to_the_store_at_once(
    worker: tuple[WorkerHalf, Client], monkeypatch: pytest.MonkeyPatch, late: bool, is_behind: bool
) -> None:
    half, client = worker

    def save(saver: StepSaver, layer: int, kv_layer: torch.Tensor) -> bool:
        if layer == 1 and not is_behind:
            raise RuntimeError("planted")
        return layer == 0

    monkeypatch.setattr(half._mover, "save", save)
    run_step(half, plan_for(client.arena, [3], late=late))
    assert [ref.slot for ref in client.suspected] == [1]
    run_step(half, StepPlan(epoch=client.arena.epoch))
    assert len(client.suspected) == 1
