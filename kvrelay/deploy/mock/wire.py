"""The link into one node: what is sent over it goes one after the other, layer by layer while it is computed."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.types import Value

Later = Callable[[float, Callable[[], None]], object]
"""Calls back at a time of the clock that ``now`` comes from."""


class Sent(Value, frozen=True, kw_only=True):
    """What became of some bytes."""

    there_s: float
    """When they are there."""
    moving_s: float
    late_bytes: int
    """Bytes that were still to move when all was computed."""


class Wire:
    """A bandwidth and a latency, both of the real clock."""

    def __init__(self, *, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0

    def __repr__(self) -> str:
        return f"<Wire {self._bytes_per_s / 1e9:g} GB/s>"

    def send(self, size_bytes: int, *, begun_s: float, computed_s: float, layers: int) -> Sent:
        """Send what is computed between two times, one of ``layers`` after the other: the last one goes at the end."""
        took_s = size_bytes / self._bytes_per_s
        ends_s = max(max(begun_s, self._free_s) + took_s, computed_s + took_s / layers)
        self._free_s = ends_s
        return Sent(
            there_s=ends_s + self._latency_s,
            moving_s=took_s + self._latency_s,
            late_bytes=min(size_bytes, round((ends_s - computed_s) * self._bytes_per_s)),
        )
