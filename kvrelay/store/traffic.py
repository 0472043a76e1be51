"""What crossed the wire for one transfer, as its receiver saw it. It never estimates: bytes count once they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.types import Transport


@dataclass(slots=True)
class Traffic:
    """Sizes, and the time in which payload was moving.

    A transfer that is pushed layer by layer is open for as long as the prefill, and idle for most of that: its bytes
    over its whole duration say how fast P computes, not how fast the link is.
    """

    transport: Transport = Transport.LOCAL
    bytes: int = 0
    pages: int = 0
    runs: int = 0
    """Pieces of memory without a gap."""
    first_at: float | None = None
    """When the first payload began."""
    moving_s: float = 0.0
    """Payloads that arrive side by side count once."""
    _open: int = 0
    _since: float = 0.0

    @contextmanager
    def arriving(self, transport: Transport, clock: Callable[[], float]) -> Iterator[None]:
        """A payload is being received inside the block."""
        now = clock()
        self.transport = transport
        self.first_at = now if self.first_at is None else self.first_at
        self._since = self._since if self._open else now
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self.moving_s += clock() - self._since

    def add(self, size_bytes: int, runs: int) -> None:
        """A payload is in."""
        self.bytes += size_bytes
        self.runs += runs

    def duration_s(self, now: float) -> float:
        """Seconds since the first payload began; 0 without one."""
        return 0.0 if self.first_at is None else now - self.first_at
