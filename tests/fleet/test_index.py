"""Pages that were sent to a worker, approximately."""

from __future__ import annotations

from kvrelay.fleet.index import PageIndex, SentPages
from kvrelay.types import PageName


def names(*numbers: int) -> list[PageName]:
    return [PageName(number.to_bytes(16, "little")) for number in numbers]


def test_only_an_unbroken_prefix_counts() -> None:
    sent = SentPages("i1", 10)
    sent.add(names(1, 2, 4))
    assert [sent.prefix(names(*chain)) for chain in [(1, 2, 3, 4), (2, 1), (9,), ()]] == [2, 2, 0, 0]


def test_the_deepest_pages_of_the_oldest_chain_are_forgotten_first() -> None:
    sent = SentPages("i1", 4)
    sent.add(names(1, 2, 3))
    sent.add(names(11, 12))
    assert len(sent) == 4
    assert sent.prefix(names(1, 2, 3)) == 2
    assert sent.prefix(names(11, 12)) == 2


def test_memory_is_bounded_by_what_the_worker_can_hold() -> None:
    index = PageIndex()
    for number in range(0, 100_000, 2):
        index.add("p1", "i1", names(number, number + 1), limit=500)
    assert repr(index) == "<PageIndex 1 workers, 500 pages>"


def test_entries_die_with_the_incarnation() -> None:
    index = PageIndex()
    index.add("p1", "i1", names(1), limit=5)
    assert index.prefix("p1", "i2", names(1)) == 0
    index.add("p1", "i2", names(2), limit=5)
    assert (index.prefix("p1", "i2", names(1)), index.prefix("p1", "i1", names(1))) == (0, 0)
    index.drop("p1")
    assert index.prefix("p1", "i2", names(2)) == 0
