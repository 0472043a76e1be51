"""Segments of one batch as columns: which they are, how long, and their checksums. It never says where they lie.

A batch has hundreds of them or thousands, so that an object for each would cost more than its checksum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvrelay.errors import Malformed
from kvrelay.protocol.peer import Manifest
from kvrelay.store.arena import Bools, Checksums, Ints


class Columns(NamedTuple):
    """By segment, in the order of their bytes."""

    pages: Ints
    """Positions among the names of their transfer."""
    layers: Ints
    checksums: Checksums
    """``[segments, shards]``."""

    @property
    def shards(self) -> int:
        return int(self.checksums.shape[1])

    def manifest(self) -> Manifest:
        """As a peer is told."""
        return Manifest(self.pages.tolist(), self.layers.tolist(), self.checksums.ravel().tolist())


def read_manifest(manifest: Manifest) -> Columns:
    """What a peer says. Raises ``Malformed`` when its columns do not fit one another."""
    count = len(manifest.pages)
    if not 0 < count == len(manifest.layers) <= len(manifest.checksums) or len(manifest.checksums) % count:
        raise Malformed("segments without as many pages as layers, or without equally many checksums each, came")
    sums = np.array(manifest.checksums, np.uint64).reshape(count, -1)
    return Columns(np.array(manifest.pages, np.int64), np.array(manifest.layers, np.int64), sums)


def begins_run(slots: Ints, layers: Ints, sizes: Ints, segment_bytes: int) -> Bools:
    """With which segments a run without gaps begins; a run does not leave its slot.

    ``segment_bytes``: from one layer to the next; of a partial page, whose segments are shorter, each is a run.
    """
    begins = np.ones(len(slots), np.bool_)
    np.logical_or(slots[1:] != slots[:-1], layers[1:] != layers[:-1] + 1, out=begins[1:])
    begins[1:] |= sizes[:-1] != segment_bytes
    return begins


def has_twins(keys: Ints) -> bool:
    """Whether two are alike; most often they ascend."""
    return bool((keys[1:] <= keys[:-1]).any()) and len(np.unique(keys)) != len(keys)


def tally(rows: Ints) -> tuple[Ints, Ints]:
    """Each of ``rows`` once, and how often it is there. Of rows near one another, as those of a batch are."""
    if not len(rows):
        return rows, rows
    first = rows.min()
    counts = np.bincount(rows - first)
    distinct = np.flatnonzero(counts)
    return distinct + first, counts[distinct]
