"""Engines of all kinds that a mover can serve, with a compute queue that tests fill by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from kvrelay.connector.flash_layout import FlashLayout
from kvrelay.connector.layout import BlockLayout, KVLayout, token_slots
from kvrelay.connector.mover import HostMover, Mover
from kvrelay.connector.stream_mover import StreamMover
from kvrelay.connector.streams import CudaStreams
from tests.connector import caches
from tests.connector.sim_device import COMPUTE, Schedule, SimDevice, SimStreams

LAYERS = 3
BUSY_CYCLES = 2_000_000
"""About a millisecond of a GPU: long enough that whatever does not wait for it is early."""


class EngineBench:
    """One engine: its blocks, its mover, and its compute queue. ``mover`` is set by the maker."""

    mover: Mover

    def __init__(
        self,
        layers: list[torch.Tensor],
        layout: KVLayout,
        compute: Callable[[Callable[[], None]], None],
        synchronize: Callable[[], None],
        go: Callable[[], None] = lambda: None,
    ) -> None:
        self.layers = layers
        self.layout = layout
        self.compute = compute
        """Enqueue work of the engine."""
        self.synchronize = synchronize
        """Return when the device has nothing to do."""
        self.go = go
        """Let copies that nobody needed yet be made."""
        self.counts: dict[str, int] = {}
        self.published = threading.Semaphore(0)
        """Released once for every layer published."""

    def report(self, counts: dict[str, int]) -> None:
        self.counts |= counts

    def write(self, layer: int, table: list[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """The engine's kernel, in its own queue."""
        kv_layer = self.layers[layer]
        blocks, offsets = token_slots(table, 0, len(key), caches.BLOCK_TOKENS)
        parts = [part.to(kv_layer.device) for part in (blocks * caches.BLOCK_TOKENS + offsets, key, value)]
        self.compute(lambda: self.layout.scatter(kv_layer, *parts))

    def read(self, layer: int, table: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What an operation of the engine finds that is enqueued now."""
        places = self.layout.place(*token_slots(table, 0, tokens, caches.BLOCK_TOKENS))
        found: list[torch.Tensor] = []
        self.compute(lambda: found.extend(part.clone() for part in self.layout.gather(self.layers[layer], *places)))
        self.synchronize()
        return found[0].cpu(), found[1].cpu()


def on_host() -> EngineBench:
    layers = [caches.empty_cache() for _ in range(LAYERS)]
    layout = BlockLayout(layers[0], caches.write_dim_major)
    bench = EngineBench(layers, layout, lambda work: work(), lambda: None)
    bench.mover = HostMover(layout, lambda: bench.published.release())
    return bench


def on_sim(schedule: Schedule, order: str, seed: int = 0, *, staging_bytes: int = 1 << 20) -> EngineBench:
    device = SimDevice(schedule, seed)
    layers = [caches.flash_cache(order) for _ in range(LAYERS)]
    layout = FlashLayout(layers[0], caches.write_flash, caches.BLOCK_TOKENS)
    bench = EngineBench(layers, layout, lambda work: device.push(COMPUTE, work), device.synchronize, device.go)
    bench.mover = StreamMover(
        layout,
        SimStreams(device, "saves"),
        SimStreams(device, "loads"),
        published=lambda: bench.published.release(),
        report=bench.report,
        staging_bytes=staging_bytes,
        bounce_bytes=4096,
    )
    return bench


def on_cuda(order: str) -> EngineBench:
    """Skips where torch sees no CUDA device. The engine's queue is kept busy, so that what does not wait is early."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    layers = [caches.flash_cache(order, device=str(device)) for _ in range(LAYERS)]
    layout = FlashLayout(layers[0], caches.write_flash, caches.BLOCK_TOKENS)

    def compute(work: Callable[[], None]) -> None:
        torch.cuda._sleep(BUSY_CYCLES)
        work()

    bench = EngineBench(layers, layout, compute, torch.cuda.synchronize)
    bench.mover = StreamMover(
        layout,
        CudaStreams(device),
        CudaStreams(device),
        published=lambda: bench.published.release(),
        report=bench.report,
        staging_bytes=1 << 20,
        bounce_bytes=4096,
    )
    return bench
