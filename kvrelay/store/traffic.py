"""What crossed the wire for one transfer, as its receiver saw it. It never estimates: bytes count once they are in."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import Transport


@dataclass(slots=True)
class Traffic:
    """Sizes, and when the first of it came.

    How long bytes were moving is the sender's to say: of what comes through shared memory, its receiver sees the end.
    """

    transport: Transport = Transport.LOCAL
    bytes: int = 0
    pages: int = 0
    runs: int = 0
    """Pieces of memory without a gap."""
    first_at: float | None = None
    """When the first payload began."""

    def begin(self, transport: Transport, now: float) -> None:
        """A payload is coming."""
        self.transport = transport
        self.first_at = now if self.first_at is None else self.first_at

    def add(self, size_bytes: int, runs: int) -> None:
        """A payload is in."""
        self.bytes += size_bytes
        self.runs += runs

    def duration_s(self, now: float) -> float:
        """Seconds since the first payload began; 0 without one."""
        return 0.0 if self.first_at is None else now - self.first_at
