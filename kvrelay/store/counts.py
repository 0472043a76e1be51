"""Named counters of a store, its workers' reports included. Bounded: a flood of names is dropped."""

from __future__ import annotations

from collections.abc import Mapping

MAX_NAMES = 512
MAX_NAME_LENGTH = 64
MAX_COUNT = (1 << 63) - 1
"""What a message can carry; an unsound worker must not end the store's heartbeats."""
KNOWN = (
    "pages_put",
    "pages_evicted",
    "pages_failed",
    "pages_damaged",
    "pages_received",
    "checksum_failures",
    "stale_refs",
    "bytes_pushed",
    "bytes_received",
    "codec_bytes_saved",
    "pushes_failed",
    "transfers_arrived",
    "transfers_failed",
    "owners_lost",
)
"""Counters that are always shown, from zero."""


class Counts:
    """Monotonic counts by name; the unit is in the name."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(KNOWN, 0)

    def __repr__(self) -> str:
        return f"<Counts {len(self._counts)} names>"

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, 0)

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add what a worker reports; names over the limits and decreases are ignored."""
        for name, amount in counts.items():
            known = name in self._counts or len(self._counts) < MAX_NAMES
            if known and amount > 0 and len(name) <= MAX_NAME_LENGTH:
                self._counts[name] = min(self[name] + amount, MAX_COUNT)

    def all(self) -> dict[str, int]:
        return dict(self._counts)
