"""Host memory that copies from a device land in: taken in order, given back in order, never more than its size."""

from __future__ import annotations

import threading
from collections import deque

import torch

ALIGNMENT = 256
"""Bytes; what GPUs align their own allocations to."""


class StagingRing:
    """One buffer used round and round. Safe between one thread that takes and one that gives back."""

    def __init__(self, memory: torch.Tensor) -> None:
        """``memory``: bytes, one-dimensional."""
        self.memory = memory
        self._size = len(memory)
        self._lock = threading.Lock()
        self._taken: deque[tuple[int, int]] = deque()

    def __repr__(self) -> str:
        return f"<StagingRing {len(self._taken)} taken of {self._size} bytes>"

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes without a gap; None when too much is taken already."""
        with self._lock:
            start = self._start_for(-(-size_bytes // ALIGNMENT) * ALIGNMENT)
            if start is None:
                return None
            self._taken.append((start, start + size_bytes))
        return self.memory[start : start + size_bytes]

    def _start_for(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= self._size else None
        oldest, newest_end = self._taken[0][0], -(-self._taken[-1][1] // ALIGNMENT) * ALIGNMENT
        if self._taken[-1][0] < oldest:
            return newest_end if newest_end + size <= oldest else None
        if newest_end + size <= self._size:
            return newest_end
        # Round the end: one byte must stay between, or a full ring would look like an empty one.
        return 0 if size <= oldest else None

    def give_back(self) -> None:
        """Return what was taken first."""
        with self._lock:
            self._taken.popleft()
