"""What a push sends at a time: segments of its pages, and the runs of memory that they are, here and there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvrelay.protocol.peer import Segments, Written
from kvrelay.store.arena import Arena, Ints
from kvrelay.store.segments import Columns, begins_run
from kvrelay.types import Codec, Transport


class Places(NamedTuple):
    """Where segments lie, by segment; of all of them the page has the same layout here and there."""

    slots: Ints
    layers: Ints
    sizes: Ints
    targets: Ints
    """The receiver's slots; -1 where none was lent."""
    generations: Ints
    """Of the receiver's slots."""


class Runs(NamedTuple):
    """Bytes without a gap, none of them beyond one page."""

    slots: Ints
    starts: Ints
    """Bytes from the start of their slot, here and there."""
    sizes: Ints
    targets: Ints
    generations: Ints


def runs_of(places: Places, segment_bytes: int) -> Runs:
    """Neighbours joined."""
    at = np.flatnonzero(begins_run(places.slots, places.layers, places.sizes, segment_bytes))
    return Runs(
        places.slots[at],
        places.layers[at] * segment_bytes,
        np.add.reduceat(places.sizes, at),
        places.targets[at],
        places.generations[at],
    )


@dataclass(frozen=True)
class Batch:
    """Segments to send."""

    message: Segments
    columns: Columns
    arena: Arena
    runs: Runs
    codec: Codec
    """What the peer takes, should it travel by TCP."""

    @property
    def views(self) -> list[memoryview]:
        """Its bytes, in order."""
        return self.arena.pieces(self.runs.slots * self.arena.stride + self.runs.starts, self.runs.sizes)

    def written(self, transport: Transport) -> Written:
        """What its receiver is told once it was written into the slots that were lent for it."""
        message = self.message
        return Written(
            transfer=message.transfer,
            manifest=message.manifest,
            payload_bytes=message.payload_bytes,
            serial=message.serial,
            transport=transport,
        )

    @property
    def has_lent_slots(self) -> bool:
        """Whether the sender may write all of it into the receiver's arena."""
        return bool((self.runs.targets >= 0).all())
