"""How fast work goes that several threads do at once, on a machine that has other work too. No clock of its own."""

from __future__ import annotations

FRESH_S = 30.0
"""A pace is believed for so long: then what slowed the work down may be over."""


class Pace:
    """Bytes a second while anybody is at work."""

    def __init__(self) -> None:
        self._at_work = 0
        self._since = 0.0
        self._done_bytes = 0
        self._bytes_s = 0.0
        self._seen_at: float | None = None

    def __repr__(self) -> str:
        return f"<Pace {self._bytes_s / 1e9:.2f} GB/s, {self._at_work} at work>"

    def begin(self, now: float) -> None:
        """One more begins."""
        if self._at_work == 0:
            self._since, self._done_bytes = now, 0
        self._at_work += 1

    def end(self, size_bytes: int, now: float) -> None:
        """One of them has done ``size_bytes``."""
        self._at_work -= 1
        self._done_bytes += size_bytes
        self._bytes_s = self._done_bytes / max(now - self._since, 1e-9)
        self._seen_at = now

    def bytes_s(self, now: float) -> float | None:
        """The pace of the last stretch of work; None when there was none lately."""
        fresh = self._seen_at is not None and now - self._seen_at <= FRESH_S
        return self._bytes_s if fresh else None
