"""Counters that workers report: whatever they say, the sum can be told in a message."""

from __future__ import annotations

from kvrelay.protocol.client import Described
from kvrelay.protocol.frame import FrameReader, encode
from kvrelay.store.counts import KNOWN, MAX_COUNT, MAX_NAMES, Counts


def test_a_flood_of_names_is_dropped_and_known_ones_still_count() -> None:
    counts = Counts()
    counts.merge({f"name-{number}": 1 for number in range(2 * MAX_NAMES)})
    counts.merge({"pages_put": 3})
    assert len(counts.all()) == MAX_NAMES
    assert counts["pages_put"] == 3


def test_decreases_and_names_that_are_too_long_are_ignored() -> None:
    counts = Counts()
    counts.merge({"pages_put": -1, "x" * 65: 1})
    assert counts.all() == dict.fromkeys(KNOWN, 0)


def test_a_sum_never_outgrows_a_message() -> None:
    counts = Counts()
    for _ in range(3):
        counts.merge({"saves": MAX_COUNT})
    assert counts["saves"] == MAX_COUNT
    described = Described(id=1, counts=counts.all())
    reader = FrameReader()
    reader.feed(encode(described))
    assert reader.next() == described
