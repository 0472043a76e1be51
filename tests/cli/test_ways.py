"""One line about each way to another store."""

import pytest

from kvrelay.cli.ways import in_words
from kvrelay.protocol.client import LinkReport
from kvrelay.types import Transport


@pytest.mark.parametrize(
    ("bytes_per_s", "words"),
    [(2.5e9, "2.50 GB/s"), (1e8, "0.10 GB/s"), (99e6, "99.00 MB/s"), (1.25e6, "1.25 MB/s"), (3e4, "0.03 MB/s")],
)
def test_the_speed_of_a_slow_way_can_be_read_too(bytes_per_s: float, words: str) -> None:
    way = LinkReport(peer="d:1", transport=Transport.TCP, rank=1, bytes_per_s=bytes_per_s, latency_s=0.02)
    assert in_words(way) == f"to d:1 by tcp: {words}, round trip 20.00 ms; taken"
