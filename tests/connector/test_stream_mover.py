"""What is only true where blocks are on a device: the forward thread asks for copies and never waits for one."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.connector.flash_layout import FlashLayout
from kvrelay.connector.plan import SaveJob
from kvrelay.connector.stream_mover import StreamMover
from kvrelay.connector.streams import page_lock
from kvrelay.errors import Misconfigured
from kvrelay.store.arena import Arena
from tests.connector import caches, movers
from tests.connector.movers import LAYERS, EngineBench
from tests.connector.sim_device import Schedule, SimDevice, SimStreams
from tests.connector.test_movers import FORMAT, TABLE, pages, payload, prompt, saved, wait_published
from tests.patience import PATIENCE_S

LAYER_BYTES = sum(page * FORMAT.token_layer_bytes for page in (32, 32, 32, 20))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(FORMAT, slots=8, epoch=1000)
    yield arena
    arena.close()


@pytest.fixture
def bench() -> Iterator[EngineBench]:
    bench = movers.on_sim(Schedule.LATE, "NHD")
    yield bench
    bench.mover.close()


class Stalled(SimStreams):
    """Copies that do not end before they are let go."""

    def __init__(self, device: SimDevice, queue: str, go: threading.Event) -> None:
        super().__init__(device, queue)
        self._go = go

    def enqueue(self, work: Callable[[], None]) -> Any:
        mark = super().enqueue(work)
        wait, go = mark.wait, self._go

        def wait_for_both() -> None:
            go.wait(PATIENCE_S)
            wait()

        mark.wait = wait_for_both  # type: ignore[method-assign]
        return mark


def test_when_copies_fall_behind_pages_are_dropped_and_nobody_waits(arena: Arena) -> None:
    go, device = threading.Event(), SimDevice(Schedule.AT_ONCE)
    bench = movers.on_sim(Schedule.AT_ONCE, "NHD")
    mover = StreamMover(
        bench.layout,
        Stalled(device, "saves", go),
        SimStreams(device, "loads"),
        published=lambda: bench.published.release(),
        report=bench.report,
        staging_bytes=2 * LAYER_BYTES,
        bounce_bytes=4096,
    )
    saver = mover.open(arena, [SaveJob("request", TABLE, pages(arena))])
    assert [mover.save(saver, layer, bench.layers[layer]) for layer in range(LAYERS)] == [True, True, False]
    assert bench.counts == {"saves_behind": 1}
    go.set()
    wait_published(bench, layers=2)
    bench.mover.close()
    mover.close()


def test_a_layer_that_cannot_be_published_is_counted_and_the_next_ones_go_on(
    bench: EngineBench, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, written = pages(arena), prompt(1)
    bad = bench.mover.open(arena, [SaveJob("bad", TABLE, copies)])
    good = bench.mover.open(arena, [SaveJob("good", TABLE, copies)])

    def fail(layer: int, staged: list[torch.Tensor]) -> None:
        raise OSError("planted")

    monkeypatch.setattr(bad, "publish", fail)
    assert bench.mover.save(bad, 0, bench.layers[0])
    for layer, (key, value) in enumerate(written):
        bench.write(layer, TABLE, key, value)
        assert bench.mover.save(good, layer, bench.layers[layer])
    wait_published(bench)
    assert bench.counts == {"saves_crashed": 1}
    assert [saved(arena, page) for page in copies] == [payload(written, page) for page in copies]


def test_a_save_that_cannot_be_enqueued_keeps_no_memory(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = movers.on_sim(Schedule.LATE, "NHD")
    mover = bench.mover

    def fail(work: Callable[[], None]) -> None:
        raise RuntimeError("planted")

    saver = mover.open(arena, [SaveJob("request", TABLE, pages(arena))])
    with monkeypatch.context() as planted:
        planted.setattr(SimStreams, "enqueue", lambda self, work: fail(work))
        with pytest.raises(RuntimeError, match="planted"):
            mover.save(saver, 0, bench.layers[0])
    for layer in range(LAYERS):
        assert mover.save(saver, layer, bench.layers[layer])
    wait_published(bench)
    mover.close()
    assert "0 taken" in repr(mover)


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Notes what is asked of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique", "masked_select", "bincount")
"""Operations whose result the host needs: on a device they stop the forward thread."""


@pytest.mark.slow
def test_the_forward_thread_asks_for_nothing_that_it_would_have_to_wait_for(arena: Arena) -> None:
    bench = movers.on_sim(Schedule.AT_ONCE, "NHD")
    saver = bench.mover.open(arena, [SaveJob("request", TABLE, pages(arena))])
    with Watch() as watch:
        assert bench.mover.save(saver, 0, bench.layers[0])
        bench.mover.fence()
    names = [name.split(".")[1] for name, _, _ in watch.calls]
    assert "copy_" in names, "the copy to the host is seen"
    assert not set(names) & set(WAITS)
    for name, args, kwargs in watch.calls:
        if "copy_" in name:
            assert kwargs.get("non_blocking") or args[2:] == (True,), (name, args[2:], kwargs)
    bench.mover.close()


def test_only_the_memory_of_copies_is_page_locked_and_it_is_unlocked_at_the_end() -> None:
    bench = movers.on_sim(Schedule.AT_ONCE, "NHD", staging_bytes=4096)
    mover = bench.mover
    assert isinstance(mover, StreamMover)
    streams = [mover._saves, mover._loads]
    assert [len(each.pinned) for each in streams if isinstance(each, SimStreams)] == [1, 1]
    mover.close()
    assert [len(each.pinned) for each in streams if isinstance(each, SimStreams)] == [0, 0]


@pytest.mark.parametrize(("code", "raises"), [(0, False), (2, True)])
def test_memory_that_cuda_will_not_lock_is_a_misconfiguration(
    monkeypatch: pytest.MonkeyPatch, code: int, raises: bool
) -> None:
    asked: list[tuple[int, int]] = []

    def register(address: int, size: int, flags: int) -> SimpleNamespace:
        asked.append((address, size))
        return SimpleNamespace(value=code)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    memory = torch.empty(4096, dtype=torch.uint8)
    with pytest.raises(Misconfigured, match="ulimit -l") if raises else contextlib.nullcontext():
        page_lock(memory)
    assert asked == [(memory.data_ptr(), 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_cuda_itself_sees_no_wait_on_the_forward_thread(arena: Arena, order: str) -> None:
    bench = movers.on_cuda(order)
    saver = bench.mover.open(arena, [SaveJob("request", TABLE, pages(arena))])
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.mover.fence()
        again = bench.mover.open(arena, [SaveJob("request", TABLE, pages(arena, first_slot=4))])
        for layer in range(LAYERS):
            assert bench.mover.save(saver, layer, bench.layers[layer])
            assert bench.mover.save(again, layer, bench.layers[layer])
        bench.mover.fence()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wait_published(bench, layers=2 * LAYERS)
    bench.mover.close()


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_vllms_own_kernel_writes_what_the_layout_reads(order: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device on this machine")
    device = pytest.importorskip("kvrelay.connector.device")
    write = functools.partial(device._write_flash, scale=torch.ones(1, device="cuda"))
    layout = FlashLayout(caches.flash_cache(order, device="cuda"), write, caches.BLOCK_TOKENS)
    assert order in repr(layout)
