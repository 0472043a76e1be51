"""Leases, incarnations, goodbyes and pairs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvrelay.errors import Malformed, Refused
from kvrelay.fleet.member import STALLED_S
from kvrelay.fleet.workers import FORGET_S, MAX_MEMBERS, Fleet, Handoff, NoHandoff, Roster
from kvrelay.types import Role, WorkerInfo
from tests.fleet.values import store, worker


def roster() -> Roster[WorkerInfo]:
    members: Roster[WorkerInfo] = Roster(dead_after_s=2.0)
    members.register(worker("w"), 0.0)
    members.link("w", "i1", 1)
    return members


@pytest.mark.parametrize(("now", "usable"), [(0.0, True), (2.0, True), (2.01, False)])
def test_a_lease_lasts_as_long_as_it_says(now: float, usable: bool) -> None:
    assert roster().is_usable("w", now) is usable


def test_a_heartbeat_renews_the_lease_and_brings_a_silent_member_back() -> None:
    members = roster()
    assert [info.name for info in members.expire(5.0)] == ["w"]
    assert members.expire(5.1) == []
    members.hear("w", "i1", healthy=True, counts={}, now=6.0)
    assert members.is_usable("w", 7.0)
    assert [info.name for info in members.expire(9.0)] == ["w"]


def test_an_unhealthy_member_is_alive_but_gets_no_work() -> None:
    members = roster()
    members.hear("w", "i1", healthy=False, counts={}, now=1.0)
    assert not members.is_usable("w", 1.0)
    assert members.expire(1.0) == []


def test_heartbeats_of_old_incarnations_and_strangers_are_counted_and_ignored() -> None:
    members = roster()
    members.link("w", "i1", -1)
    assert members.register(worker("w", incarnation="i2"), 0.0)
    assert not members.register(worker("w", incarnation="i2"), 0.0)
    members.hear("w", "i1", healthy=True, counts={}, now=9.0)
    members.hear("x", "i1", healthy=True, counts={}, now=9.0)
    assert members.stale_heartbeats == 2
    assert not members.is_usable("w", 9.0)


def test_a_ghost_does_not_take_the_place_of_a_member_that_lives() -> None:
    members = roster()
    with pytest.raises(Refused, match="another name"):
        members.register(worker("w", incarnation="i0"), 1.0)
    assert (members.usable(1.0)[0].incarnation, members.refused) == ("i1", 1)
    # The same incarnation may dial again before its old link is seen to end.
    assert not members.register(worker("w"), 1.0)
    members.link("w", "i1", 1)
    members.link("w", "i1", -1)
    with pytest.raises(Refused):
        members.register(worker("w", incarnation="i0"), 1.0)


@pytest.mark.parametrize("how", ["its lease ran out", "its link is lost", "it said goodbye"])
def test_a_restarted_member_gets_its_name_back(how: str) -> None:
    members = roster()
    if how == "its link is lost":
        members.link("w", "i1", -1)
    elif how == "it said goodbye":
        members.leave("w", "i1")
    assert members.register(worker("w", incarnation="i2"), 2.1 if how == "its lease ran out" else 0.1)
    # The end of the old link is seen late: it takes nothing from the new member.
    members.link("w", "i2", 1)
    members.link("w", "i1", -1)
    with pytest.raises(Refused):
        members.register(worker("w", incarnation="i3"), 2.1)


def test_who_says_goodbye_is_gone_at_once() -> None:
    members = roster()
    assert members.leave("w", "i1")
    assert not members.is_usable("w", 0.0)
    assert members.expire(9.0) == []


def something_happens(members: Roster[WorkerInfo], name: str, dice: random.Random, now: float) -> None:
    events: list[Callable[[], object]] = [
        lambda: members.hear(name, "i1", healthy=dice.random() < 0.8, counts={}, now=now, progress=1),
        lambda: members.hear(name, "i1", healthy=True, counts={}, now=now, progress=dice.randrange(9)),
        lambda: members.stall(name, now),
        lambda: members.leave(name, "i1"),
        lambda: members.link(name, "i1", dice.choice((1, -1))),
        lambda: members.leave(name, "i1") and members.register(worker(name), now),
        lambda: members.expire(now),
    ]
    dice.choice(events)()


@pytest.mark.parametrize("linked", [False, True])
def test_whatever_happens_the_usable_members_are_those_that_are_usable_one_by_one(linked: bool) -> None:
    for seed in range(100):
        dice, members, now = random.Random(seed), Roster[WorkerInfo](dead_after_s=2.0, linked=linked), 0.0
        names = [f"w{number}" for number in range(4)]
        for name in names:
            members.register(worker(name), now)
        for _ in range(60):
            now += dice.choice((0.0, 0.1, 1.0, 2.0, STALLED_S))
            something_happens(members, dice.choice(names), dice, now)
            known = members.usable(now)
            assert [info.name for info in known] == [each for each in names if members.is_usable(each, now)], seed
            assert members.usable(now) is known


def test_the_long_dead_are_forgotten_and_their_number_is_bounded() -> None:
    members = roster()
    members.expire(5.0)
    members.expire(FORGET_S + 1)
    assert len(members) == 0
    for number in range(MAX_MEMBERS):
        members.register(worker(f"w{number}"), 0.0)
    with pytest.raises(Malformed, match="stop some"):
        members.register(worker("one more"), 0.0)
    members.register(worker("w0"), 0.0)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (worker("p", Role.PREFILL), worker("d", Role.DECODE), Handoff(push_to=None)),
        (worker("p", Role.PREFILL), worker("d", Role.DECODE, store="s2"), Handoff(push_to="127.0.0.1:9002")),
        (worker("p", Role.PREFILL), worker("d", Role.BOTH), Handoff(push_to=None)),
        (worker("p", Role.BOTH), worker("d", Role.BOTH), NoHandoff(reason="colocated")),
        (worker("p", Role.BOTH), worker("p", Role.BOTH), NoHandoff(reason="colocated")),
        (worker("p", Role.PREFILL, weights="x"), worker("d", Role.DECODE), NoHandoff(reason="fingerprint.weights")),
        (worker("p", Role.PREFILL), worker("d", Role.DECODE, store="s9"), NoHandoff(reason="store s9 is not ready")),
        (
            worker("p", Role.PREFILL, dtype="float32"),
            worker("d", Role.DECODE),
            NoHandoff(reason="fingerprint.format.dtype"),
        ),
    ],
)
def test_pairs(prefill: WorkerInfo, decode: WorkerInfo, expected: Handoff | NoHandoff) -> None:
    fleet = Fleet(dead_after_s=2.0)
    fleet.stores.register(store("s1", "127.0.0.1:9001"), 0.0)
    fleet.stores.register(store("s2", "127.0.0.1:9002"), 0.0)
    assert fleet.pair(prefill, decode, 1.0) == expected


def test_kv_types_are_bridged_only_where_the_operator_allows_it() -> None:
    fleet = Fleet(dead_after_s=2.0, convert_kv_dtype=True)
    fleet.stores.register(store(), 0.0)
    decode = worker("d", Role.DECODE)
    for dtype, expected in (("float32", Handoff(push_to=None, converts=True)), ("bfloat16", Handoff(push_to=None))):
        assert fleet.pair(worker(f"p-{dtype}", Role.PREFILL, dtype=dtype), decode, 1.0) == expected
    half = fleet.pair(worker("p-half", Role.PREFILL, dtype="float16"), decode, 1.0)
    assert half == NoHandoff(reason="fingerprint.format.dtype")


def test_a_worker_that_registers_with_new_weights_is_compared_anew() -> None:
    fleet = Fleet(dead_after_s=2.0)
    fleet.stores.register(store(), 0.0)
    decode = worker("d", Role.DECODE)
    for weights, expected in (("w1", Handoff(push_to=None)), ("w2", NoHandoff(reason="fingerprint.weights"))):
        prefill = worker("p", Role.PREFILL, weights=weights)
        fleet.register_worker(prefill, 0.0)
        assert fleet.pair(prefill, decode, 1.0) == expected
