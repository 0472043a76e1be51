"""Moves pages of an engine whose blocks are on a device, beside its compute stream. It never makes the host wait for
the device, except on threads of its own.

Saving: what the engine enqueued for a layer, then ours: gather its tokens in canonical order into device memory, copy
that into page-locked host memory. A thread waits for the copy, takes the checksums, and publishes. Loading: host memory
was verified already; it is copied and written to the blocks by the engine's own kernel.

Copies do not go straight between the device and the arena: a late one could then land in a slot that another writer
was given meanwhile, before that one takes its checksum. What is verified is private, as on a CPU.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue

import torch

from kvrelay.connector.layout import KVLayout
from kvrelay.connector.plan import SaveJob
from kvrelay.connector.ring import StagingRing
from kvrelay.connector.saver import StepSaver
from kvrelay.connector.streams import Mark, Streams
from kvrelay.store.arena import Arena
from kvrelay.types import WHOLE, Shard

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 << 20
"""A step of 2,048 tokens of an 8B model: the thread that empties it is rarely more than some layers behind."""
BOUNCE_BYTES = 8 << 20
"""One copy to the device at a time while loading."""


@dataclass(frozen=True)
class _Copy:
    """One layer on its way to the host."""

    saver: StepSaver
    layer: int
    staged: list[torch.Tensor]
    """On the device; held until the copy is done."""
    hosts: list[torch.Tensor]
    done: Mark


class _GivenUp(Enum):
    """Host memory was taken for a copy that could not be enqueued."""

    COPY = 0


_GIVEN_UP = _GivenUp.COPY


class StreamMover:
    """One stream and one thread for saves, one stream for loads."""

    def __init__(
        self,
        layout: KVLayout,
        save_streams: Streams,
        load_streams: Streams,
        *,
        published: Callable[[], None],
        report: Callable[[dict[str, int]], None],
        staging_bytes: int = STAGING_BYTES,
        bounce_bytes: int = BOUNCE_BYTES,
    ) -> None:
        self._layout = layout
        self.block_tokens = layout.block_tokens
        self._saves = save_streams
        self._loads = load_streams
        self._published = published
        self._report = report
        self._ring = StagingRing(torch.empty(staging_bytes, dtype=torch.uint8))
        self._bounce = torch.empty(bounce_bytes, dtype=torch.uint8)
        save_streams.pin(self._ring.memory)
        load_streams.pin(self._bounce)
        self._gathered: Mark | None = None
        """After the last gather; blocks may be overwritten behind it."""
        self._todo: SimpleQueue[_Copy | _GivenUp | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvrelay-saver", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<StreamMover {self._layout}, {self._todo.qsize()} layers behind, {self._ring}>"

    # ------------------------------------------------------------ the forward thread

    def open(self, arena: Arena, jobs: list[SaveJob], shard: Shard = WHOLE) -> StepSaver:
        return StepSaver(arena, self._layout, jobs, shard)

    def save(self, saver: StepSaver, layer: int, kv_layer: torch.Tensor) -> bool:
        hosts = self._host_memory(saver.shapes, kv_layer.dtype)
        if hosts is None:
            self._report({"saves_behind": 1})
            return False
        try:
            self._todo.put(self._enqueue(saver, layer, kv_layer, hosts))
        except BaseException:
            self._todo.put(_GIVEN_UP)  # what was taken is given back in order, by the thread
            raise
        return True

    def _enqueue(self, saver: StepSaver, layer: int, kv_layer: torch.Tensor, hosts: list[torch.Tensor]) -> _Copy:
        staged: list[torch.Tensor] = []
        self._saves.follow()
        self._gathered = self._saves.enqueue(lambda: staged.extend(saver.stage(kv_layer)))
        done = self._saves.enqueue(lambda: _copy_all(staged, hosts))
        return _Copy(saver, layer, staged, hosts, done)

    def _host_memory(self, shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[torch.Tensor] | None:
        counts = [rows * elements for rows, elements in shapes]
        memory = self._ring.take(sum(counts) * dtype.itemsize)
        if memory is None:
            return None
        parts = memory.view(dtype).split(counts)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def fence(self) -> None:
        if self._gathered is not None:
            self._saves.hold(self._gathered)
            self._gathered = None
        self._loads.follow()

    def close(self) -> None:
        """End the thread once it has published what is under way. A second call does nothing."""
        if not self._thread.is_alive():
            return
        self._todo.put(None)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._saves.unpin(self._ring.memory)
            self._loads.unpin(self._bounce)

    # ------------------------------------------------------------ the saver's thread

    def _run(self) -> None:
        while (copy := self._todo.get()) is not None:
            if isinstance(copy, _Copy):
                copy.done.wait()
                self._publish(copy)
            self._ring.give_back()

    def _publish(self, copy: _Copy) -> None:
        try:
            copy.saver.publish(copy.layer, copy.hosts)
        except Exception:  # border: a page that cannot be published is given up; those of other requests are not
            logger.exception("publishing layer %d failed; its pages are given up", copy.layer)
            self._report({"saves_crashed": 1})
            return
        self._published()

    # ------------------------------------------------------------ the loader's thread

    def scatter(self, kv_layer: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        rows = max(1, len(self._bounce) // (slots.element_size() + 2 * key[0].nbytes))
        for start in range(0, len(slots), rows):
            part = slice(start, start + rows)
            self._scatter_part(kv_layer, slots[part], key[part], value[part])

    def _scatter_part(self, kv_layer: torch.Tensor, *sources: torch.Tensor) -> None:
        pinned, at = [], 0
        for source in sources:
            target = self._bounce[at : at + source.nbytes].view(source.dtype).view(source.shape)
            pinned.append(target.copy_(source))
            at += source.nbytes

        def write() -> None:
            slots, key, value = (part.to(kv_layer.device, non_blocking=True) for part in pinned)
            self._layout.scatter(kv_layer, slots, key, value)

        self._loads.enqueue(write).wait()


def _copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
