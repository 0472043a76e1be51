"""What the router says to members: over the last link of each, and to nobody who is not there."""

from __future__ import annotations

import pytest

from kvrelay.protocol.feed import Neighbours
from kvrelay.router import switchboard
from kvrelay.router.switchboard import Switchboard

HELLO = Neighbours(addresses=[])


def test_a_member_without_a_link_hears_nothing() -> None:
    board = Switchboard()
    assert not board.say("s1", HELLO)
    line = board.open("s1")
    assert board.say("s1", HELLO)
    board.close("s1", line)
    assert not board.say("s1", HELLO)
    assert board.unheard == 2


def test_the_end_of_a_former_link_does_not_close_the_line_of_the_next() -> None:
    board = Switchboard()
    former = board.open("s1")
    board.open("s1")
    board.close("s1", former)
    assert board.say("s1", HELLO)


def test_who_does_not_read_is_not_told_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "MAX_QUEUED", 2)
    board = Switchboard()
    board.open("s1")
    assert [board.say("s1", HELLO) for _ in range(3)] == [True, True, False]
