"""The link into one node: what is sent over it goes one after the other."""

from __future__ import annotations

from collections.abc import Callable

Later = Callable[[float, Callable[[], None]], object]
"""Calls back at a time of the clock that ``now`` comes from."""


class Wire:
    """A bandwidth and a latency, both of the real clock."""

    def __init__(self, *, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0

    def __repr__(self) -> str:
        return f"<Wire {self._bytes_per_s / 1e9:g} GB/s>"

    def send(self, size_bytes: int, now: float) -> tuple[float, float]:
        """When ``size_bytes`` are there, and for how long they were on their way."""
        begins_s = max(now, self._free_s)
        took_s = size_bytes / self._bytes_per_s
        self._free_s = begins_s + took_s
        return self._free_s + self._latency_s, took_s + self._latency_s
