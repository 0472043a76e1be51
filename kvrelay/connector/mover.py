"""How bytes get from an engine's blocks into the arena and back, by the kind of memory that the blocks are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.connector.layout import KVLayout
from kvrelay.connector.plan import SaveJob
from kvrelay.connector.saver import StepSaver
from kvrelay.store.arena import Arena
from kvrelay.types import WHOLE, Shard


class LoadTarget(Protocol):
    """An engine's blocks, to be written."""

    block_tokens: int

    def scatter(self, kv_layer: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write host tensors ``[n, kv_head, head_dim]`` to token slots; they are there when this returns.

        For the loader's thread.
        """
        ...


class Mover(LoadTarget, Protocol):
    """Moves pages for one engine. The forward thread calls all but ``scatter``, and never waits in any."""

    def open(self, arena: Arena, jobs: list[SaveJob], shard: Shard = WHOLE) -> StepSaver:
        """Resolve where the pages of a step lie, of which this engine's blocks hold ``shard``."""
        ...

    def save(self, saver: StepSaver, layer: int, kv_layer: torch.Tensor) -> bool:
        """Copy one layer as the engine has it now, or will once it has done what it enqueued. False: given up."""
        ...

    def fence(self) -> None:
        """Between the engine's steps: what it does to its blocks from now on comes after the copies that were asked
        for, and loads that start from now on come after what it did until now."""
        ...

    def close(self) -> None: ...


class HostMover:
    """Blocks in host memory: a copy is over when the call is, so nothing needs an order."""

    def __init__(self, layout: KVLayout, published: Callable[[], None]) -> None:
        """``published`` is called whenever layers were marked ready."""
        self._layout = layout
        self._published = published
        self.block_tokens = layout.block_tokens

    def __repr__(self) -> str:
        return f"<HostMover {self._layout}>"

    def open(self, arena: Arena, jobs: list[SaveJob], shard: Shard = WHOLE) -> StepSaver:
        return StepSaver(arena, self._layout, jobs, shard)

    def save(self, saver: StepSaver, layer: int, kv_layer: torch.Tensor) -> bool:
        saver.save(layer, kv_layer)
        self._published()
        return True

    def fence(self) -> None:
        """Nothing is under way."""

    def scatter(self, kv_layer: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._layout.scatter(kv_layer, slots, key, value)

    def close(self) -> None:
        """Nothing to end."""
