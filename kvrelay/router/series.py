"""The series of one metric, by their labels. It must never be given labels that clients choose: none is forgotten."""

from __future__ import annotations

from typing import Generic, TypeVar

from prometheus_client import Counter, Histogram

M = TypeVar("M", Counter, Histogram)


class Series(Generic[M]):
    """Keeps what ``labels`` found: to look for it, under a lock, costs more than to count."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._known: dict[tuple[str, ...], M] = {}

    def __repr__(self) -> str:
        return f"<{len(self._known)} Series>"

    def of(self, *labels: str) -> M:
        """The one with these values of the metric's labels."""
        known = self._known.get(labels)
        if known is None:
            known = self._known[labels] = self._metric.labels(*labels)
        return known
