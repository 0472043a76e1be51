"""Tests of router/clients.py: who is let in, and who has to go."""

from __future__ import annotations

import pytest

from kvrelay.router.clients import HEAD_S, KEEPALIVE_S, MAX_CLIENTS, STALL_S, SURPLUS, Clients, Ending, most_clients
from kvrelay.router.shortage import Lack, Shortage


class FakeGuest:
    """Keeps how it was ended."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.unsent_bytes = 0

    def hang_up(self, ending: Ending) -> None:
        self.ending = ending


class House:
    """Clients, and a clock that the test turns."""

    def __init__(self, descriptors: int = 100) -> None:
        self.now_s = 0.0
        self.shortage = Shortage(lambda: self.now_s)
        self.clients = Clients(lambda: self.now_s, self.shortage, lambda: descriptors)

    def guest(self, *, asks: bool = False, kept: bool = False) -> FakeGuest:
        guest = FakeGuest()
        self.clients.came(guest)
        if asks or kept:
            self.clients.asks(guest)
        if kept:
            self.clients.answered(guest)
        return guest

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.clients.tick()


@pytest.mark.parametrize("descriptors", [16, 256, 1024, 20_000, 65_536, 1 << 20])
def test_each_clients_request_has_a_descriptor_for_its_worker_and_members_have_theirs(descriptors: int) -> None:
    most = most_clients(descriptors)
    assert 0 < most <= MAX_CLIENTS
    assert 2 * most <= 0.75 * descriptors or 2 * most + 1024 < descriptors


def test_a_silent_client_has_its_time_and_no_more() -> None:
    house = House()
    silent, asking = house.guest(), house.guest(asks=True)
    house.pass_s(HEAD_S - 0.1)
    late = house.guest()
    assert not silent.ending
    house.pass_s(0.2)
    house.clients.left(silent)
    assert (silent.ending, asking.ending, late.ending) == (Ending.SILENT, None, None)
    house.pass_s(1e6)
    assert asking.ending is None, "it waits for its answer"
    assert len(house.clients) == 1


def test_an_idle_client_is_kept_for_longer_and_anew_after_each_answer() -> None:
    house = House()
    idle = house.guest(kept=True)
    house.pass_s(KEEPALIVE_S - 0.1)
    house.clients.asks(idle)
    house.clients.answered(idle)
    house.pass_s(KEEPALIVE_S - 0.1)
    assert idle.ending is None
    house.pass_s(0.2)
    assert idle.ending is Ending.IDLE


def test_bytes_that_trickle_in_do_not_give_a_head_more_time() -> None:
    house = House()
    guest = house.guest(kept=True)
    for _ in range(4):
        house.clients.speaks(guest)
        house.pass_s(HEAD_S / 4)
    assert guest.ending is Ending.SILENT


@pytest.mark.parametrize("kept_first", [False, True])
def test_where_all_places_are_taken_the_longest_idle_one_goes(kept_first: bool) -> None:
    house = House(descriptors=8)
    assert house.clients.most == 3
    first = house.guest(kept=kept_first)
    house.now_s += 1.0
    others = [house.guest(kept=not kept_first), house.guest(asks=True)]
    house.now_s += 1.0
    newest = house.guest()
    assert first.ending is Ending.EVICTED
    assert [each.ending for each in (*others, newest)] == [None] * 3
    assert len(house.clients) == 3
    assert house.shortage.counts == {Lack.CONNECTIONS: 1}
    assert "8 open files" in house.shortage.why


def test_where_all_are_busy_some_are_let_in_to_be_told_so_and_then_none() -> None:
    house = House(descriptors=8)
    busy = [house.guest(asks=True) for _ in range(3)]
    told = [house.guest(asks=True) for _ in range(SURPLUS)]
    assert not any(map(house.clients.is_surplus, busy))
    assert all(map(house.clients.is_surplus, told))
    assert house.guest().ending is Ending.REFUSED
    house.clients.left(told[0])
    silent = house.guest()
    assert house.clients.is_surplus(silent)
    assert house.guest().ending is None, "it has the place of the silent one"
    assert silent.ending is Ending.EVICTED
    house.clients.left(busy[0])
    assert not house.clients.is_surplus(house.guest())
    assert all(each.ending is None for each in (*busy, *told))


def test_who_takes_an_answer_slowly_is_waited_for_and_who_takes_nothing_is_not() -> None:
    house = House()
    slow, stuck = house.guest(asks=True), house.guest(asks=True)
    for guest in (slow, stuck):
        house.clients.sends(guest)
        guest.unsent_bytes = 100
    for _ in range(3):
        house.pass_s(STALL_S)
        slow.unsent_bytes -= 1
    assert (slow.ending, stuck.ending) == (None, Ending.STALLED)
    house.clients.answered(slow)
    house.pass_s(STALL_S)
    assert slow.ending is Ending.IDLE


def test_a_shortage_is_over_after_a_while() -> None:
    house = House()
    house.shortage.add(Lack.DESCRIPTORS, "no descriptors")
    assert house.shortage.why == "no descriptors"
    house.pass_s(60.0)
    assert house.shortage.why == ""
