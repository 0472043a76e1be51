"""Medians and percentiles as the tables print them: milliseconds, by nearest rank, never interpolated."""

from __future__ import annotations

import math
from collections.abc import Iterable


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def spread_ms(values: Iterable[float]) -> dict[str, float]:
    """Count, p50, p99, p99.9 and maximum of ``values`` in seconds."""
    kept = list(values)
    return {
        "n": len(kept),
        "p50_ms": ms(quantile(kept, 0.5)),
        "p99_ms": ms(quantile(kept, 0.99)),
        "p999_ms": ms(quantile(kept, 0.999)),
        "max_ms": ms(quantile(kept, 1.0)),
    }
