"""Signs of life of an engine, in a small shared file: each of its processes counts what it does there, and whoever
supervises it reads along. It must never cost a forward pass more than a store to memory."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

MAX_WRITERS = 128
_COUNT = struct.Struct("<Q")
_SIZE_BYTES = MAX_WRITERS * _COUNT.size

SCHEDULER = 0
"""Writer of the engine process; ranks come after it."""


def ticks_path(engine_file: Path) -> Path:
    """Where an engine that describes itself in ``engine_file`` counts."""
    return engine_file.with_suffix(".ticks")


class Ticks:
    """One process's own count."""

    def __init__(self, path: Path, writer: int) -> None:
        """``writer``: ``SCHEDULER``, or 1 + the rank. Raises ``OSError``."""
        self._writer = writer % MAX_WRITERS
        self._count = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE_BYTES)  # as long as it is already, where another process was first
            self._map = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"<Ticks {self._count} of writer {self._writer}>"

    def tick(self) -> None:
        """Something was done: a step was scheduled, a layer was computed."""
        self._count += 1
        _COUNT.pack_into(self._map, self._writer * _COUNT.size, self._count)


def read_ticks(path: Path) -> int | None:
    """All that was done so far; None as long as nobody counts there."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    whole = data[: len(data) - len(data) % _COUNT.size]
    return sum(count for (count,) in _COUNT.iter_unpack(whole)) if whole else None
