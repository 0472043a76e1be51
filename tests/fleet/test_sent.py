"""Pages that were sent to a worker, approximately."""

from __future__ import annotations

from kvrelay.fleet.sent import SentPages
from tests.fleet.values import names


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


def test_nothing_outlives_two_turns_unless_it_is_sent_again() -> None:
    sent = SentPages("i1", 10)
    sent.add(names(1, 2))
    sent.turn()
    sent.add(names(1))
    sent.turn()
    assert (len(sent), sent.prefix(names(1))) == (1, 1)
    sent.turn()
    assert len(sent) == 0


def test_what_the_worker_reports_on_is_a_promise_no_more() -> None:
    sent = SentPages("i1", 10)
    sent.add(names(1, 2, 3))
    sent.settle(names(2, 9))
    assert sent.prefix(names(1, 2, 3)) == 1
    assert sent.prefix(names(1, 2, 3), 2) == 1
