"""Tests of benchmarks/quantiles.py: percentiles by nearest rank."""

from __future__ import annotations

import math

import pytest

from benchmarks.quantiles import quantile, spread_ms


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.99, 4), (1.0, 4)])
def test_a_percentile_is_a_value_that_was_measured(share: float, value: float) -> None:
    assert quantile([3, 1, 4, 2], share) == value


def test_nothing_measured_is_no_number() -> None:
    assert math.isnan(quantile([], 0.5))


def test_a_spread_is_in_milliseconds_and_says_of_how_many() -> None:
    assert spread_ms([0.002, 0.001]) == {"n": 2, "p50_ms": 1.0, "p99_ms": 2.0, "p999_ms": 2.0, "max_ms": 2.0}
