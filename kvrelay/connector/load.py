"""One load in progress: pages are copied into an engine's blocks, each layer as soon as it is in.

It must never give the engine a byte that was not verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.connector.heads import RankHeads
from kvrelay.connector.layout import token_slots
from kvrelay.connector.mover import LoadTarget
from kvrelay.connector.pace import Pace
from kvrelay.connector.plan import LoadJob
from kvrelay.connector.staging import Staging
from kvrelay.store.arena import Arena, Bools
from kvrelay.types import PageFormat, SlotRef

FULL_LOOK_S = 0.1
"""Pause between looks at all pages of a load: meanwhile one mark of the last that was missing is looked at."""


@dataclass(frozen=True)
class LoadResult:
    """A load that ended: which blocks hold garbage, and what went wrong, by counter name."""

    request_id: str
    bad_blocks: frozenset[int]
    suspects: tuple[SlotRef, ...]
    counts: dict[str, int]
    format: PageFormat | None = None
    """Of the suspects' arena, where it is not the engine's own."""
    size_bytes: int = 0
    """Bytes of its pages when all were loaded, else 0."""
    moving_s: float = 0.0
    """Seconds of copying, verifying and writing, without the waits for pages."""


class Load:
    """Layers of a job's pages, one after another. Pages from ``usable`` on are given up."""

    def __init__(
        self, job: LoadJob, arena: Arena, layout: LoadTarget, layers: list[torch.Tensor], heads: RankHeads, now: float
    ) -> None:
        self.job = job
        self._layout = layout
        self._layers = layers
        self._staging = Staging(arena, job.pages, heads)
        self.usable = len(job.pages)
        self.layer = 0
        self.pace = Pace(len(layers), now)
        self._fewest_missing = len(job.pages) + 1
        self._progress_at = 0.0
        self._awaited = 0
        """The last page that was missing."""
        self._look_at = 0.0
        """When to look at all pages again, should that one not come before."""
        self._placed = (-1, -1)
        self._places: torch.Tensor = torch.empty(0)
        self.counts: dict[str, int] = {}
        self.suspects: list[SlotRef] = []
        self.moving_s = 0.0
        self._size_bytes = len(job.pages) * arena.format.page_bytes
        self._drop(self._staging.outside())  # before anything looks there

    def __repr__(self) -> str:
        return (
            f"<Load {self.job.request_id} at layer {self.layer}, {self.usable} of {len(self.job.pages)} pages usable>"
        )

    @property
    def ended(self) -> bool:
        return self.layer == len(self._layers) or not self.usable

    def advance(self, now: float, wait_s: float) -> bool:
        """Copy the next layer if it is in; whether anything moved. Gives up what made no progress for ``wait_s``."""
        moved = self._try(now, wait_s)
        if moved:
            self.pace.moved()
        else:
            self.pace.missed(now)
        return moved

    def _try(self, now: float, wait_s: float) -> bool:
        if now < self._look_at and not self._staging.may_be_in(self._awaited, self.layer):
            return False
        ready = self._ready()
        if not ready.all():
            self.drop_lost()
            ready = self._ready()
        if ready.all():  # one look decides all that follows: marks come in meanwhile
            if self.usable:
                self.copy_layer()
            self._fewest_missing = len(self.job.pages) + 1
            return True
        lacking = np.flatnonzero(~ready)
        missing, self._awaited, self._look_at = len(lacking), int(lacking[-1]), now + FULL_LOOK_S
        if missing < self._fewest_missing:
            self._fewest_missing, self._progress_at = missing, now
        elif now - self._progress_at > wait_s:
            self.give_up_from(int(lacking[0]), "load_stalled")
        return False

    def give_up_from(self, page: int, reason: str) -> None:
        """Pages ``page, page + 1, ...`` will not be loaded: the engine computes them."""
        if page < self.usable:
            self.usable, self._look_at = page, 0.0
            self.counts[reason] = self.counts.get(reason, 0) + 1

    def drop_lost(self) -> None:
        """Give up from the first page whose writer failed or whose slot was reused."""
        self._drop(self._staging.lost(self.usable))

    def _drop(self, lost: Bools) -> None:
        if lost.any():
            self.give_up_from(int(np.argmax(lost)), "load_page_lost")

    def _ready(self) -> Bools:
        """Which usable pages hold the next layer."""
        return self._staging.ready(self.usable, self.layer)

    def copy_layer(self) -> None:
        """Copy the next layer of the usable pages: into private memory, verify there, then into the blocks."""
        kv_layer = self._layers[self.layer]
        self._staging.copy(self.usable, self.layer)
        self._verify()
        if self.usable:
            key, value, first = self._wanted(kv_layer.dtype)
            self._layout.scatter(kv_layer, self._slots(first, len(key)), key, value)
        self.layer += 1

    def _slots(self, first: int, tokens: int) -> torch.Tensor:
        """Where ``tokens`` positions from ``first`` on lie in a layer: in all of them alike."""
        if (first, tokens) != self._placed:
            blocks, offsets = token_slots(self.job.blocks, first, tokens, self._layout.block_tokens)
            self._placed, self._places = (first, tokens), blocks * self._layout.block_tokens + offsets
        return self._places

    def _verify(self) -> None:
        bad = self._staging.first_bad(self.usable, self.layer)
        if bad is not None:
            page = self.job.pages[bad]
            self.suspects.append(SlotRef(page.slot, page.generation))
            self.give_up_from(bad, "load_bad_checksum")
        still = self._ready()
        if not still.all():
            self.give_up_from(int(np.argmin(still)), "load_slot_reused")

    def _wanted(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
        """K and V of the wanted positions, each ``[n, kv_head, head_dim]`` of ``dtype``, and the first position.

        Pages of another type are converted here, rounding to the nearest; those of ``dtype`` are left as they are.
        """
        key, value = self._staging.keys_values(self.usable)
        first = self.job.pages[0].start
        skip = max(0, self.job.begin - first)
        return key[skip:].to(dtype), value[skip:].to(dtype), first + skip

    def result(self) -> LoadResult:
        is_whole = self.usable == len(self.job.pages)
        return LoadResult(
            self.job.request_id,
            frozenset() if is_whole else self._bad_blocks(),
            tuple(self.suspects),
            self.counts,
            self.job.format,
            size_bytes=self._size_bytes if is_whole else 0,
            moving_s=self.moving_s,
        )

    def _bad_blocks(self) -> frozenset[int]:
        size = self._layout.block_tokens
        first = max(self.job.begin, self.job.pages[self.usable].start) // size
        return frozenset(self.job.blocks[first : -(-self.job.end // size)])
