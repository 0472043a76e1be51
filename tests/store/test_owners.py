"""Whose a slot is while it is being filled, and what is left of a writer that is gone: no socket, and time by hand."""

from __future__ import annotations

import pytest

from kvrelay.config import StoreConfig
from kvrelay.protocol.client import Acquire, Acquired, Announce, NewPage
from kvrelay.store.catalog import QUARANTINE_S
from kvrelay.store.keeper import FILL_STALL_S, Keeper
from kvrelay.store.page import Writer
from kvrelay.types import SlotRef
from tests.store.conftest import FORMAT, page_name


class Store:
    """A store with one client, that fills page 1."""

    def __init__(self) -> None:
        self.keeper = Keeper("s", StoreConfig(arena_bytes=1 << 20), epoch=7, emit=lambda event: None)
        self.shelf = self.keeper.room.shelf(FORMAT)
        self.arena = self.shelf.arena
        self.keeper.attach_owner("w/1")
        self.writer = self.keeper.join("w/1", 0.0)
        self.ref = self.begin(1)

    def begin(self, number: int) -> SlotRef:
        (ref,) = self.keeper.catalog.grant(self.writer, self.shelf, 1, 0.0)
        self.keeper.announce(self.writer, Announce(pages=[NewPage(page_name(number), ref, 8)]), FORMAT, 0.0)
        return ref

    def fill(self, ref: SlotRef) -> None:
        for layer in range(FORMAT.layers):
            self.arena.publish(ref, layer, 0)
        self.keeper.progress(0.0)

    def acquire(self, writer: Writer, number: int) -> Acquired:
        return self.keeper.acquire(writer, Acquire(id=1, lease="l", names=[page_name(number)], ttl_s=60.0), 0.0)

    def expect_free_after_quarantine(self, since: float) -> None:
        self.keeper.tick(since)
        assert self.arena.is_current(self.ref), "its writer may be in the middle of a layer"
        self.keeper.tick(since + QUARANTINE_S)
        assert not self.arena.is_current(self.ref)
        self.keeper.check_invariants()


@pytest.mark.parametrize("suspected_at", [1.0, FILL_STALL_S + 1], ids=["in time", "after it stalled"])
def test_an_owner_gives_back_what_it_will_never_fill(suspected_at: float) -> None:
    store = Store()
    store.keeper.tick(suspected_at)
    store.keeper.suspect("w/1", store.shelf, [store.ref], suspected_at)
    assert store.arena.is_failed(store.ref)
    assert store.keeper.describe()["pages_failed"] == 1
    store.expect_free_after_quarantine(suspected_at)


def test_nobody_can_free_a_slot_that_another_is_writing() -> None:
    store = Store()
    store.keeper.suspect("x/1", store.shelf, [store.ref], 0.0)
    store.keeper.tick(2 * QUARANTINE_S)
    assert store.keeper.describe()["pages_failed"] == 0
    store.fill(store.ref)
    assert store.keeper.exists([page_name(1)], 0.0) == [True]
    store.keeper.check_invariants()


def test_a_lost_owner_leaves_nothing_behind() -> None:
    store = Store()
    other = store.keeper.join("x/1", 0.0)
    store.fill(store.begin(7))
    store.keeper.catalog.grant(store.writer, store.shelf, 3, 0.0)
    assert store.acquire(store.writer, 7).pages != [None]
    assert store.acquire(other, 1).pages != [None]
    store.keeper.leave(store.writer, 1.0)
    store.keeper.detach_owner("w/1")
    assert store.arena.is_failed(store.ref)
    assert store.acquire(other, 1).pages == [None]
    store.keeper.tick(1.0 + QUARANTINE_S)
    assert store.arena.is_current(store.ref), "another one reads it"
    store.keeper.leases.release(other, "l")
    store.expect_free_after_quarantine(1.0)
    gauges = ("pages_pinned", "leases_open", "pages_filling", "slots_failed", "slots_granted", "owners")
    assert not any(store.keeper.describe()[name] for name in gauges)
    assert store.keeper.describe()["owners_lost"] == 1
    assert store.keeper.exists([page_name(7)], 0.0) == [True]
