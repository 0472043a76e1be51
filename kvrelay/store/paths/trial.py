"""The test that a path passes before pages go over it: known patterns, checked on the other side, and timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvrelay.errors import Lost
from kvrelay.store.paths.path import Path

SMALL_BYTES = 64
LARGE_BYTES = (64 << 10, 256 << 10, 1 << 20)
MAX_PROBE_BYTES = LARGE_BYTES[-1]
ROUNDS = 3
LONG_S = 0.01
"""A link on which a probe takes longer is known well enough, and has better things to carry."""
TYPICAL_BYTES = 4 << 20


@dataclass(frozen=True)
class Score:
    """How fast a path proved to be."""

    latency_s: float
    """A small probe there and the answer back."""
    bytes_per_s: float

    def seconds(self, size_bytes: int = TYPICAL_BYTES) -> float:
        """What a batch of ``size_bytes`` takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


async def prove(path: Path, clock: Callable[[], float]) -> Score:
    """Test ``path``. Raises ``Lost`` when a pattern did not come through whole, or not at all."""
    await _once(path, SMALL_BYTES, clock)  # it also pays for what is set up on first use
    latency_s = await _best(path, SMALL_BYTES, clock)
    for size in LARGE_BYTES:
        seconds = await _best(path, size, clock)
        if seconds > LONG_S:
            break
    return Score(latency_s, size / seconds)


async def _best(path: Path, size: int, clock: Callable[[], float]) -> float:
    """The shortest of several: a busy machine makes any one of them long."""
    return min([await _once(path, size, clock) for _ in range(ROUNDS)])


async def _once(path: Path, size: int, clock: Callable[[], float]) -> float:
    pattern = _pattern()[:size]
    started = clock()
    if not await path.probe(pattern):
        raise Lost(f"{path.transport} did not bring a test pattern of {size} bytes through whole")
    return max(clock() - started, 1e-9)


@functools.cache
def _pattern() -> memoryview:
    return memoryview(np.random.default_rng(0x6B76).bytes(MAX_PROBE_BYTES))
