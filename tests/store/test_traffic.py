"""What is counted of a transfer's payload, with a clock made of numbers."""

from __future__ import annotations

from kvrelay.store.traffic import Traffic
from kvrelay.types import Transport


def test_payloads_add_up_from_the_first_one_on() -> None:
    traffic = Traffic()
    traffic.begin(Transport.TCP, 10.0)
    traffic.add(100, runs=2)
    traffic.begin(Transport.TCP, 20.0)
    traffic.add(50, runs=1)
    assert (traffic.transport, traffic.bytes, traffic.runs, traffic.duration_s(21.0)) == (Transport.TCP, 150, 3, 11.0)


def test_a_payload_that_breaks_off_counts_no_bytes() -> None:
    traffic = Traffic()
    traffic.begin(Transport.TCP, 1.0)
    assert (traffic.bytes, traffic.runs) == (0, 0)


def test_without_payload_nothing_crossed() -> None:
    traffic = Traffic()
    assert (traffic.transport, traffic.duration_s(5.0)) == (Transport.LOCAL, 0.0)
