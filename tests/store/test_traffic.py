"""What is counted of a transfer's payload, with a clock made of numbers."""

from __future__ import annotations

import pytest

from kvrelay.store.traffic import Traffic
from kvrelay.types import Transport


def test_the_time_between_payloads_is_no_time_of_moving() -> None:
    traffic, moments = Traffic(), iter([10.0, 11.0, 20.0, 20.5])
    for size in (100, 50):
        with traffic.arriving(Transport.TCP, lambda: next(moments)):
            pass
        traffic.add(size, runs=2)
    assert (traffic.bytes, traffic.runs, traffic.moving_s) == (150, 4, 1.5)
    assert traffic.duration_s(21.0) == 11.0


def test_payloads_side_by_side_are_timed_once() -> None:
    traffic, moments = Traffic(), iter([1.0, 2.0, 4.0])
    with traffic.arriving(Transport.TCP, lambda: next(moments)), traffic.arriving(Transport.TCP, lambda: next(moments)):
        pass
    assert traffic.moving_s == 3.0


def test_a_payload_that_breaks_off_stops_the_time_and_counts_no_bytes() -> None:
    traffic, moments = Traffic(), iter([1.0, 2.0, 5.0, 7.0])
    with pytest.raises(ConnectionError), traffic.arriving(Transport.TCP, lambda: next(moments)):
        raise ConnectionError
    with traffic.arriving(Transport.TCP, lambda: next(moments)):
        pass
    assert (traffic.bytes, traffic.moving_s) == (0, 3.0)


def test_without_payload_nothing_crossed() -> None:
    traffic = Traffic()
    assert (traffic.transport, traffic.duration_s(5.0), traffic.moving_s) == (Transport.LOCAL, 0.0, 0.0)
