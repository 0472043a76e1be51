"""How fast shared work goes: alone, side by side, after a pause, and when it is long ago."""

from __future__ import annotations

from kvrelay.store.pace import FRESH_S, Pace


def test_nothing_is_known_before_any_work_was_done() -> None:
    pace = Pace()
    assert pace.bytes_s(0.0) is None
    pace.begin(0.0)
    assert pace.bytes_s(1.0) is None


def test_work_side_by_side_counts_once_in_time_and_twice_in_bytes() -> None:
    pace = Pace()
    pace.begin(10.0)
    pace.begin(10.0)
    pace.end(100, 12.0)
    pace.end(100, 12.0)
    assert pace.bytes_s(12.0) == 100.0


def test_a_pause_between_two_stretches_does_not_count() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.end(100, 1.0)
    pace.begin(20.0)
    pace.end(50, 21.0)
    assert pace.bytes_s(21.0) == 50.0


def test_what_is_long_ago_is_not_believed() -> None:
    pace = Pace()
    pace.begin(0.0)
    pace.end(100, 1.0)
    assert pace.bytes_s(1.0 + FRESH_S) == 100.0
    assert pace.bytes_s(1.001 + FRESH_S) is None


def test_work_without_any_time_has_a_pace_too() -> None:
    pace = Pace()
    pace.begin(5.0)
    pace.end(100, 5.0)
    assert (pace.bytes_s(5.0) or 0) > 0
