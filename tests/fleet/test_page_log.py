"""What a holder tells its routers: whoever follows knows exactly what is there, wherever he began."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.fleet import page_log
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import PageEvents, PageSnapshot
from kvrelay.types import Medium, PageName
from tests.fleet.values import names

HBM, DISK = Medium.HBM, Medium.DISK


def unread(reader: Iterator[PageEvents | PageSnapshot | None]) -> list[PageEvents | PageSnapshot]:
    found = []
    while (message := next(reader)) is not None:
        found.append(message)
    return found


def learn(known: set[PageName], messages: list[PageEvents | PageSnapshot], medium: Medium = HBM) -> None:
    for message in messages:
        if isinstance(message, PageSnapshot):
            if message.part == 0:
                known.clear()
            known.update(message.names if message.medium is medium else ())
        else:
            for change in message.changes:
                if change.medium is medium:
                    known.difference_update(change.removed)
                    known.update(change.stored)


def test_who_knows_nothing_gets_everything_and_then_what_changes() -> None:
    log = PageLog("i1")
    log.store(names(1, 2), HBM)
    log.store(names(3), DISK)
    reader = log.follow(-1)
    first = unread(reader)
    assert [(message.part, message.last) for message in first if isinstance(message, PageSnapshot)] == [
        (0, False),
        (1, True),
    ]
    log.remove(names(1), HBM)
    log.store(names(1), DISK)
    (change,) = unread(reader)
    assert isinstance(change, PageEvents)
    assert change.sequence == first[0].sequence + 1
    assert [(one.medium, one.removed, one.stored) for one in change.changes] == [
        (HBM, names(1), []),
        (DISK, [], names(1)),
    ]


def test_an_empty_holder_says_so() -> None:
    (only,) = unread(PageLog("i1").follow(-1))
    assert isinstance(only, PageSnapshot)
    assert (only.part, only.last, only.names, only.sequence) == (0, True, [], 0)


def test_many_changes_are_one_message_and_what_was_undone_is_none() -> None:
    log = PageLog("i1")
    reader = log.follow(0)
    for number in range(100):
        log.store(names(number), HBM)
    log.remove(names(*range(50)), HBM)
    log.store(names(7), HBM)
    (message,) = unread(reader)
    assert isinstance(message, PageEvents)
    assert sorted(message.changes[0].stored) == sorted(names(7, *range(50, 100)))
    log.remove(names(60), HBM)
    log.store(names(60), HBM)
    assert unread(reader) == []


def test_a_copy_that_is_told_of_twice_is_one_page() -> None:
    log = PageLog("i1")
    log.store(names(1), HBM)
    log.store(names(1), HBM)
    log.remove(names(1, 1, 9), HBM)
    assert unread(log.follow(0)) == []


def test_who_missed_some_gets_those_and_who_missed_what_is_not_kept_gets_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_log, "MAX_KEPT", 100)
    log = PageLog("i1")
    for number in range(30):
        log.store(names(number), HBM)
        unread(log.follow(log.sequence))
    assert [message.sequence for message in unread(log.follow(25))] == [26, 27, 28, 29, 30]
    assert isinstance(unread(log.follow(2))[0], PageSnapshot)
    assert isinstance(unread(log.follow(31))[0], PageSnapshot), "a number from the future is another log's"
    assert len(log._past) <= 100 / 9


def test_no_message_holds_more_names_than_a_router_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_log, "MAX_NAMES", 10)
    log = PageLog("i1")
    follower = log.follow(0)
    log.store(names(*range(35)), HBM)
    changes = unread(follower)
    assert [len(message.changes[0].stored) for message in changes if isinstance(message, PageEvents)] == [10, 10, 10, 5]
    parts = unread(log.follow(-1))
    assert [len(message.names) for message in parts if isinstance(message, PageSnapshot)] == [10, 10, 10, 5]


def test_what_changes_while_a_snapshot_is_read_is_told_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_log, "MAX_NAMES", 10)
    log = PageLog("i1")
    log.store(names(*range(35)), HBM)
    reader = log.follow(-1)
    read = [next(reader)]
    log.remove(names(*range(20)), HBM)
    log.store(names(99), HBM)
    known: set[PageName] = set()
    learn(known, [message for message in read if message is not None])
    learn(known, unread(reader))
    assert known == set(names(99, *range(20, 35)))


def test_more_changes_at_once_than_are_kept_are_a_snapshot_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_log, "MAX_KEPT", 100)
    log = PageLog("i1")
    log.store(names(*range(50)), HBM)
    reader, known = log.follow(0), set[PageName]()
    learn(known, unread(reader))
    log.store(names(*range(1000)), HBM)
    log.remove(names(7), HBM)
    messages = unread(reader)
    assert isinstance(messages[0], PageSnapshot)
    learn(known, messages)
    assert known == set(names(*(number for number in range(1000) if number != 7)))


def test_a_page_that_is_named_twice_in_one_breath_came_once() -> None:
    log = PageLog("i1")
    log.store(names(0), HBM)
    reader, known = log.follow(0), set[PageName]()
    learn(known, unread(reader))
    log.clear(HBM)
    log.store(names(0, 0), HBM)
    log.clear(HBM)
    learn(known, unread(reader))
    assert known == set()


STEP = st.tuples(st.sampled_from(["store", "remove", "clear", "read", "lose"]), st.lists(st.integers(0, 9), max_size=4))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_a_follower_knows_what_is_there_whatever_it_lost(steps: list[tuple[str, list[int]]]) -> None:
    log, known, at, there = PageLog("i1"), set[PageName](), -1, set[PageName]()
    for action, numbers in [*steps, ("read", [])]:
        if action == "store":
            log.store(names(*numbers), HBM)
            there.update(names(*numbers))
        elif action == "remove":
            log.remove(names(*numbers), HBM)
            there.difference_update(names(*numbers))
        elif action == "clear":
            log.clear(HBM)
            there.clear()
        elif action == "lose":
            unread(log.follow(log.sequence))
        else:
            messages = unread(log.follow(at))
            learn(known, messages)
            at = messages[-1].sequence if messages else at
            assert known == there
