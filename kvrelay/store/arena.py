"""Pages of one format in memory that the store and its clients map together.

It must never decide anything: which page lives in which slot is the catalog's business. Columns of
``generation``, ``state`` and ``tokens`` are written by the store alone; a slot's writers write their bytes,
their checksums and last their ``ready`` marks, so a mark that is there vouches for what it covers. Marks are kept
per layer and KV head, because the ranks of a tensor-parallel engine write one page together.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from kvrelay.store.geometry import HEADER, MEMORY_PAGE, check_header, header_of, meta_bytes, slot_stride
from kvrelay.types import WHOLE, PageFormat, Shard, SlotRef

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; not named by the mmap module."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Checksums = npt.NDArray[np.uint64]


class SlotState(IntEnum):
    """What a slot holds at its present generation."""

    FREE = 0
    FILLING = 1
    COMPLETE = 2
    FAILED = 3


def checksums(run: memoryview, part_bytes: int) -> list[int]:
    """Checksum of each part of a run without gaps."""
    return [xxhash.xxh3_64_intdigest(run[start : start + part_bytes]) for start in range(0, len(run), part_bytes)]


class Arena:
    """A mapped arena. Methods are safe from any thread; ``close`` is for its owner, when nobody uses it any more."""

    def __init__(self, fd: int, format: PageFormat, slots: int) -> None:
        self.format = format
        self.slots = slots
        self.fd = fd
        self.stride = slot_stride(format)
        self._data_offset = meta_bytes(format, slots)
        self.before_punch: Callable[[], None] = lambda: None
        """Called before memory is given back: whoever registered it with a device takes it out."""
        self._all_layers = list(range(format.layers))
        self._page_bytes = format.page_bytes
        self._map = mmap.mmap(fd, self._data_offset + slots * self.stride)
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._header = np.frombuffer(self._map, HEADER, 1)
        # A slot's marks lie together: whoever writes or checks a whole page touches one run of memory, not one a layer.
        shape = (slots, format.layers, format.kv_heads)
        columns = np.frombuffer(self._map, np.int64, 3 * slots + math.prod(shape), MEMORY_PAGE)
        self._generation, self._state, self._tokens = columns[: 3 * slots].reshape(3, slots)
        self._ready = columns[3 * slots :].reshape(shape)
        sums_at = MEMORY_PAGE + columns.nbytes
        self._checksum = np.frombuffer(self._map, np.uint64, math.prod(shape), sums_at).reshape(shape)
        """Of the run of heads that begins at this one; the other heads of a run have none."""
        self.data = np.frombuffer(self._map, np.uint8, slots * self.stride, self._data_offset).reshape(slots, -1)

    @classmethod
    def create(cls, format: PageFormat, slots: int, epoch: int) -> Arena:
        """A fresh arena of anonymous memory: it is gone with its last process, however that one ends."""
        fd = os.memfd_create("kvrelay-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, meta_bytes(format, slots) + slots * slot_stride(format))
            # Sealed: a client that could shrink the file would kill every other one with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            arena = cls(fd, format, slots)
        except BaseException:
            os.close(fd)
            raise
        # Generations start at the random epoch: a reference from before a restart can never look current.
        arena._generation[:] = epoch
        arena._header[0] = header_of(format, slots, epoch)
        return arena

    @classmethod
    def attach(cls, fd: int, format: PageFormat) -> Arena:
        """Map the arena behind ``fd``, and close ``fd``. Raises ``Malformed``, ``Incompatible``."""
        try:
            arena = cls(fd, format, check_header(fd, format))
        finally:
            os.close(fd)
        arena.fd = -1
        return arena

    def __repr__(self) -> str:
        if self.slots == 0:
            return "<Arena closed>"
        used = int(np.count_nonzero(self._state))
        return f"<Arena epoch {self.epoch:#x}, {used} of {self.slots} slots in use, {self.stride} bytes each>"

    @property
    def epoch(self) -> int:
        """Identity of this arena; slot references of another epoch mean nothing here."""
        return int(self._header["epoch"][0])

    # ------------------------------------------------------------ readers and writers

    def segment(self, slot: int, layer: int, tokens: int) -> memoryview:
        """The valid bytes of one layer of one page, writable: head after head, K of its ``tokens`` tokens, then V."""
        start = self._data_offset + slot * self.stride + layer * self.format.segment_bytes
        return self._view[start : start + tokens * self.format.token_layer_bytes]

    def span(self, slot: int, first: int, layers: int) -> memoryview:
        """``layers`` neighbouring layers of a full page as one view: one copy instead of one a layer."""
        start = self._data_offset + slot * self.stride + first * self.format.segment_bytes
        return self._view[start : start + layers * self.format.segment_bytes]

    def pieces(self, offsets: Ints, sizes: Ints) -> list[memoryview]:
        """``sizes`` bytes each, ``offsets`` bytes behind the beginning of the first slot."""
        view, starts = self._view, offsets + self._data_offset
        return [view[start:end] for start, end in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]

    def digests(self, offsets: Ints, sizes: Ints) -> Checksums:
        """Checksums of ``pieces``, as they are now."""
        digests = map(xxhash.xxh3_64_intdigest, self.pieces(offsets, sizes))
        return np.fromiter(digests, np.uint64, len(offsets))

    def views(self, slot: int, layers: list[int], tokens: int) -> list[memoryview]:
        """The segments of ``layers``, in that order, in as few views as their neighbourhood allows."""
        if tokens < self.format.page_tokens:
            return [self.segment(slot, layer, tokens) for layer in layers]
        if layers == self._all_layers:
            start = self._data_offset + slot * self.stride
            return [self._view[start : start + self._page_bytes]]
        starts = [at for at in range(len(layers)) if at == 0 or layers[at] != layers[at - 1] + 1]
        ends = [*starts[1:], len(layers)]
        return [self.span(slot, layers[start], end - start) for start, end in zip(starts, ends, strict=True)]

    def publish(self, ref: SlotRef, layer: int, checksum: int, shard: Shard = WHOLE) -> bool:
        """Mark ``layer`` as in, as far as ``shard`` goes. False, and nothing written, when ``ref`` is stale."""
        if not self.is_current(ref):
            return False
        heads = shard.heads(self.format.kv_heads)
        self._checksum[ref.slot, layer, heads.start] = checksum
        self._ready[ref.slot, layer, heads] = ref.generation
        return True

    def publish_segments(self, slots: Ints, generations: Ints, layers: Ints, checksums: Checksums) -> None:
        """Mark segments of any pages as in; ``checksums``: ``[segments, shards]``. Stale ones are left out."""
        current = self._generation[slots] == generations
        if not current.all():
            slots, generations, layers, checksums = (each[current] for each in (slots, generations, layers, checksums))
        for shard, head in enumerate(self._first_heads(checksums.shape[1])):
            self._checksum[slots, layers, head] = checksums[:, shard]
        self._ready[slots, layers] = generations[:, None]

    def publish_many(
        self, slots: Ints, generations: Ints, layer: int, checksums: Checksums, shard: Shard = WHOLE
    ) -> None:
        """``publish`` for many pages at once; stale ones are left out."""
        current = self._generation[slots] == generations
        heads = shard.heads(self.format.kv_heads)
        self._checksum[slots[current], layer, heads.start] = checksums[current]
        self._ready[slots[current], layer, heads] = generations[current, None]

    def is_current(self, ref: SlotRef) -> bool:
        """Whether ``ref`` still names what its slot holds."""
        return 0 <= ref.slot < self.slots and int(self._generation[ref.slot]) == ref.generation

    def is_failed(self, ref: SlotRef) -> bool:
        """No more layers will come: the page was given up, or ``ref`` is stale."""
        return not self.is_current(ref) or int(self._state[ref.slot]) == SlotState.FAILED

    def current(self, slots: Ints, generations: Ints) -> Bools:
        """``is_current`` for many pages at once."""
        mine: Bools = self._generation[slots] == generations
        return mine

    def lost(self, slots: Ints, generations: Ints) -> Bools:
        """``is_failed`` for many pages at once."""
        mine: Bools = (self._generation[slots] != generations) | (self._state[slots] == SlotState.FAILED)
        return mine

    def state(self, ref: SlotRef) -> SlotState:
        """State of the slot; FREE when ``ref`` is stale."""
        return SlotState(int(self._state[ref.slot])) if self.is_current(ref) else SlotState.FREE

    def tokens(self, ref: SlotRef) -> int:
        """Valid tokens of the page, 0 when ``ref`` is stale or not announced yet."""
        return int(self._tokens[ref.slot]) if self.is_current(ref) else 0

    def ready(self, slots: Ints, generations: Ints, layer: int | Ints, shard: Shard = WHOLE) -> Bools:
        """Which pages hold all heads of ``shard`` of ``layer`` (one for all, or one a page). Stale ones never do."""
        heads = shard.heads(self.format.kv_heads)
        marked: Bools = (self._ready[slots, layer, heads] == generations[:, None]).all(axis=1)
        mine: Bools = marked & (self._generation[slots] == generations)
        return mine

    def is_marked(self, slot: int, generation: int, layer: int, head: int) -> bool:
        """Whether one head of one layer is in: the cheapest look there is."""
        return int(self._ready[slot, layer, head]) == generation

    def ready_layers(self, slots: Ints, generations: Ints) -> Bools:
        """``[layers, pages]``: which layers of which pages are in."""
        marked: Bools = (self._ready[slots] == generations[:, None, None]).all(axis=2).T
        mine: Bools = marked & (self._generation[slots] == generations)
        return mine

    def is_whole(self, ref: SlotRef) -> bool:
        """Whether every layer of the page is in."""
        return self.is_current(ref) and bool((self._ready[ref.slot] == ref.generation).all())

    def page_checksums(self, slot: int, shards: int) -> list[int]:
        """Checksums of all shards of all layers of one page, in the order of its bytes."""
        sums: list[int] = self._checksum[slot, :, :: self.format.kv_heads // shards].ravel().tolist()
        return sums

    def checksums(self, slots: Ints, layers: int | Ints, shards: int = 1) -> Checksums:
        """``[slots, shards]``: checksums of a layer (one for all, or one a slot) as its writers published them."""
        return np.stack([self._checksum[slots, layers, head] for head in self._first_heads(shards)], axis=1)

    def _first_heads(self, shards: int) -> range:
        return range(0, self.format.kv_heads, self.format.kv_heads // shards)

    def populate(self, slots: list[int]) -> None:
        """Have the slots' memory mapped here before it is written: first touches cost more than the copy.

        Called through ctypes, and not as ``mmap.madvise``, because that one holds the interpreter lock meanwhile.
        """
        for slot in slots:  # an old kernel refuses; then first touches are slow
            _libc.madvise(self.address + slot * self.stride, self.stride, _MADV_POPULATE_WRITE)

    # ------------------------------------------------------------ the store alone

    def occupy(self, slots: list[int]) -> list[SlotRef]:
        """Hand out free slots for writing."""
        at = np.array(slots, np.int64)
        self._tokens[at] = 0
        self._state[at] = SlotState.FILLING
        return list(map(SlotRef, slots, self._generation[at].tolist()))

    def set_tokens(self, slots: int | list[int], tokens: int | list[int]) -> None:
        self._tokens[slots] = tokens

    def set_state(self, slot: int, state: SlotState) -> None:
        self._state[slot] = state

    def set_states(self, slots: list[int], state: SlotState) -> None:
        """``set_state`` for many slots at once."""
        self._state[slots] = state

    def vacate(self, slots: int | list[int]) -> None:
        """Make every reference to a slot, or to each of several, stale, then free it."""
        self._generation[slots] += 1
        self._state[slots] = SlotState.FREE

    @property
    def address(self) -> int:
        """Where the first slot begins in this process."""
        return self._address + self._data_offset

    def punch(self, slot: int) -> None:
        """Give the slot's memory back to the machine."""
        self.before_punch()
        start = self._data_offset + slot * self.stride
        self._map.madvise(mmap.MADV_REMOVE, start, self.stride)

    def close(self) -> None:
        """Drop the mapping and its descriptor. Views that others still hold stay valid until they drop them."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.slots, self._view = -1, 0, memoryview(b"")
        self._generation = self._state = self._tokens = np.empty(0, np.int64)
        self._ready, self._checksum = np.empty((0, 0, 0), np.int64), np.empty((0, 0, 0), np.uint64)
        self.data = np.empty((0, 0), np.uint8)
