"""The catalog: grants, announcements, pins, eviction and failures, without a socket or a clock."""

from __future__ import annotations

import random
from typing import NoReturn

import msgspec
import pytest

from kvrelay.errors import Refused
from kvrelay.protocol.client import NewPage
from kvrelay.store.arena import SlotState
from kvrelay.store.catalog import QUARANTINE_S, Catalog
from kvrelay.store.counts import Counts
from kvrelay.store.page import FOREVER, Page, Writer
from kvrelay.store.room import Room
from kvrelay.store.shelf import Shelf
from kvrelay.types import PageFormat, PageName, SlotRef

FORMAT = PageFormat(layers=2, kv_heads=1, head_dim=8, dtype="float32", page_tokens=32)
SMALL = PageFormat(layers=1, kv_heads=1, head_dim=8, dtype="float32", page_tokens=16)
STRIDE = 4096
LEASE_S = 30.0


def name(number: int) -> PageName:
    return PageName(number.to_bytes(16, "little"))


class Store:
    """A catalog with one writer and a hand-moved clock."""

    def __init__(self, slots: int) -> None:
        self.catalog = Catalog(Room(slots * STRIDE, epoch=7), Counts(), LEASE_S)
        self.shelf = self.catalog.room.shelf(FORMAT)
        self.writers = [Writer("w")]
        self.now = 0.0
        self.told: set[PageName] = set()
        """Whole pages, as far as the catalog told."""
        self.catalog.on_complete = lambda pages: self.told.update(page.name for page in pages)
        self.catalog.on_gone = self._forget

    def _forget(self, pages: list[Page]) -> None:
        for page in pages:
            self.told.remove(page.name)

    def begin(self, number: int, parent: Page | None = None, tokens: int = 32) -> Page | None:
        writer = self.writers[0]
        refs = self.catalog.grant(writer, self.shelf, 1, self.now)
        if not refs:
            return None
        return self.catalog.announce(writer, NewPage(name(number), refs[0], tokens), parent, self.now)

    def fill(self, page: Page, layers: int = 2) -> None:
        for layer in range(layers):
            page.shelf.arena.publish(page.ref, layer, 1)
        self.catalog.progress(self.now)

    def put(self, number: int, parent: Page | None = None, tokens: int = 32) -> Page:
        page = self.begin(number, parent, tokens)
        assert page is not None
        self.fill(page)
        return page

    def present(self, *numbers: int) -> list[bool]:
        return [not self.catalog.lacking([name(number)]) for number in numbers]

    def check(self) -> None:
        whole = {page.name for page in self.catalog.copies.found.values() if page.state is SlotState.COMPLETE}
        assert self.told == whole, "others were told of pages that are not here, or not of some that are"
        self.catalog.check_invariants(self.writers)


@pytest.fixture
def store() -> Store:
    assert FORMAT.page_bytes == STRIDE
    return Store(slots=4)


def test_a_page_is_there_once_all_its_layers_are_in(store: Store) -> None:
    page = store.begin(1)
    assert page is not None
    store.fill(page, layers=1)
    assert (store.present(1), store.catalog.find(name(1))) == ([False], page)
    store.fill(page)
    assert store.present(1) == [True]
    assert page.shelf.arena.state(page.ref) is SlotState.COMPLETE
    store.check()


def test_the_least_recently_used_page_goes_first(store: Store) -> None:
    pages = [store.put(number) for number in range(4)]
    store.catalog.pins.hold([pages[0]], store.now)
    store.catalog.pins.release([pages[0]])
    store.put(4)
    assert store.present(0, 1, 2, 3, 4) == [True, False, True, True, True]
    store.check()


def test_pinned_and_arriving_pages_are_never_evicted(store: Store) -> None:
    pinned = [store.put(number) for number in range(2)]
    for page in pinned:
        store.catalog.pins.hold([page], store.now)
    arriving = [store.begin(number) for number in (2, 3)]
    assert store.begin(9) is None
    assert all(page and page.shelf.arena.is_current(page.ref) for page in [*pinned, *arriving])
    store.catalog.pins.release([pinned[1]])
    assert store.begin(9) is not None
    assert store.present(0, 1) == [True, False]
    store.check()


def test_deeper_pages_of_a_chain_are_evicted_before_their_parents(store: Store) -> None:
    root = store.put(0)
    middle = store.put(1, root)
    leaf = store.put(2, middle)
    store.catalog.pins.hold([leaf], store.now)
    store.catalog.pins.release([leaf])
    store.put(3)
    store.put(4)
    assert store.present(0, 1, 2, 3, 4) == [True, True, False, True, True]
    store.put(5)
    assert store.present(0, 1, 3, 4, 5) == [True, False, True, True, True]
    store.check()


def test_a_partial_page_is_spared_for_one_lease_and_then_goes_first(store: Store) -> None:
    store.put(0, tokens=5)
    for number in (1, 2, 3, 4):
        store.put(number)
    assert store.present(0, 1) == [True, False]
    store.now = LEASE_S + 1
    store.put(5)
    assert store.present(0, 2, 3, 4, 5) == [False, True, True, True, True]
    store.check()


def test_a_partial_page_under_lease_goes_when_nothing_else_can(store: Store) -> None:
    for number in range(4):
        store.put(number, tokens=1)
    assert store.begin(9) is not None
    assert store.present(0, 1, 2, 3) == [False, True, True, True]


@pytest.mark.parametrize("faster", [0, 1])
def test_the_copy_that_is_whole_first_is_found_and_the_other_freed_when_it_is_whole(store: Store, faster: int) -> None:
    copies = [store.begin(1), store.begin(1)]
    fast, slow = copies[faster], copies[1 - faster]
    assert fast
    assert slow
    store.fill(fast)
    assert store.catalog.find(name(1)) is fast
    assert store.present(1) == [True]
    store.check()
    store.fill(slow)
    assert store.catalog.find(name(1)) is fast
    assert not store.shelf.arena.is_current(slow.ref)
    assert store.shelf.occupied == 1
    store.check()


def test_a_copy_that_another_one_overtook_stays_while_somebody_reads_it(store: Store) -> None:
    slow, fast = store.begin(1), store.begin(1)
    assert slow
    assert fast
    store.catalog.pins.hold([slow], store.now)
    store.fill(fast)
    store.fill(slow)
    assert store.shelf.arena.is_current(slow.ref)
    store.check()
    store.catalog.pins.release([slow])
    store.check()
    assert [store.put(number).name for number in (2, 3, 4)]
    assert not store.shelf.arena.is_current(slow.ref)
    assert store.present(1, 2, 3, 4) == [True] * 4
    store.check()


def test_a_copy_that_overtakes_another_one_takes_its_place_in_the_chain(store: Store) -> None:
    parent = store.put(0)
    slow, fast = store.begin(1, parent), store.begin(1, parent)
    assert slow
    assert fast
    store.fill(fast)
    assert fast.parent is parent
    assert slow.parent is None
    store.check()


def test_what_follows_an_overtaken_copy_keeps_the_one_that_is_found_from_eviction(store: Store) -> None:
    slow, fast = store.begin(1), store.begin(1)
    assert slow
    assert fast
    children = [store.put(number, slow) for number in (2, 3)]
    store.fill(fast)
    assert [child.parent for child in children] == [fast, fast]
    assert not fast.is_evictable
    store.check()
    store.fill(slow)
    store.check()


class Unlooked(dict[PageName, Page]):
    """Pages by name, that nobody may go through."""

    def values(self) -> NoReturn:
        raise AssertionError("a full store has hundreds of thousands")

    items = values


def test_a_copy_that_overtakes_another_one_looks_at_its_own_pages_alone(store: Store) -> None:
    slow, fast = store.begin(1), store.begin(1)
    assert slow
    assert fast
    gone, child = store.begin(2, slow), store.begin(3, slow)
    assert gone
    assert child
    store.catalog.fail(gone, store.now)
    copies = store.catalog.copies
    copies.found = Unlooked(copies.found)
    store.fill(fast)
    copies.found = dict(copies.found)
    assert store.catalog.find(name(1)) is fast
    assert (child.parent, gone.parent, fast.children, slow.children) == (fast, None, 1, 0)
    store.check()


def test_the_second_copy_takes_over_when_the_first_one_fails(store: Store) -> None:
    first, second = store.begin(1), store.begin(1)
    assert first
    assert second
    store.catalog.fail(first, store.now)
    assert store.catalog.find(name(1)) is second
    store.fill(second)
    assert store.present(1) == [True]
    store.check()


def test_the_page_in_a_slot_is_found_whatever_became_of_it(store: Store) -> None:
    first, second, failed = store.put(1), store.begin(2), store.begin(3)
    spare = store.begin(2)
    assert spare
    assert second
    assert failed
    store.catalog.fail(failed, FOREVER)
    for page in (first, spare, second, failed):
        assert store.catalog.in_slot(store.shelf, page.ref) is page
    store.check()
    store.fill(second)
    store.fill(spare)
    assert store.catalog.in_slot(store.shelf, spare.ref) is None, "freed as a second copy"
    assert store.catalog.in_slot(store.shelf, SlotRef(first.ref.slot, first.ref.generation - 1)) is None
    store.check()


def test_a_slot_that_was_not_granted_cannot_be_announced(store: Store) -> None:
    page = store.put(1)
    other = Writer("other")
    ref = store.catalog.grant(store.writers[0], store.shelf, 1, 0.0)[0]
    assert store.catalog.announce(other, NewPage(name(2), ref, 32), None, 0.0) is None
    assert store.catalog.announce(store.writers[0], NewPage(name(2), page.ref, 32), None, 0.0) is None
    assert store.catalog.counts["stale_refs"] == 2
    store.check()


def test_a_lost_writer_leaves_failed_pages_and_its_slots_come_back_after_quarantine(store: Store) -> None:
    writer = store.writers[0]
    page = store.begin(1)
    granted = store.catalog.grant(writer, store.shelf, 2, store.now)
    assert page
    store.catalog.lose(writer, store.now + QUARANTINE_S)
    assert store.catalog.find(name(1)) is None
    assert store.shelf.arena.is_failed(page.ref)
    store.catalog.sweep(store.now)
    assert store.shelf.occupied == 3
    store.check()
    store.catalog.sweep(store.now + QUARANTINE_S)
    assert store.shelf.occupied == 0
    assert not any(store.shelf.arena.is_current(ref) for ref in [page.ref, *granted])
    store.check()


def test_a_failed_page_keeps_its_slot_while_it_is_pinned(store: Store) -> None:
    page = store.begin(1)
    assert page
    store.catalog.pins.hold([page], store.now)
    store.catalog.fail(page, store.now)
    store.catalog.sweep(store.now)
    assert store.shelf.arena.is_current(page.ref)
    store.catalog.pins.release([page])
    store.catalog.sweep(store.now)
    assert not store.shelf.arena.is_current(page.ref)
    store.check()


def test_a_stalled_page_is_given_up_but_its_slot_waits_for_its_writer(store: Store) -> None:
    page = store.begin(1)
    assert page
    store.catalog.fail_stalled(before=1.0)
    assert store.catalog.find(name(1)) is None
    store.catalog.sweep(1e9)
    assert store.shelf.arena.is_failed(page.ref)
    assert store.shelf.arena.is_current(page.ref)
    store.fill(page)
    store.catalog.sweep(store.now)
    assert store.present(1) == [False]
    assert store.shelf.occupied == 0
    store.check()


def test_two_formats_share_one_budget(store: Store) -> None:
    small = store.catalog.room.shelf(SMALL)
    for number in range(4):
        store.put(number)
    assert store.catalog.grant(store.writers[0], small, 3, store.now)
    assert store.catalog.room.resident_bytes == 4 * STRIDE
    assert store.present(0, 1, 2, 3) == [False, False, False, True]
    store.check()


def test_a_format_that_cannot_fit_is_refused() -> None:
    room = Room(STRIDE - 1, epoch=1)
    with pytest.raises(Refused, match=r"store\.arena_bytes"):
        room.shelf(FORMAT)
    with pytest.raises(Refused, match="format"):
        room.shelf(PageFormat(layers=0, kv_heads=1, head_dim=8, dtype="float32", page_tokens=32))


def _random_step(store: Store, pinned: list[Page], dice: random.Random) -> None:
    choice = dice.random()
    live = list(store.catalog.copies.found.values())
    begun = [*live, *(page for spares in store.catalog.copies.spare.values() for page in spares)]
    if choice < 0.5:
        parent = dice.choice(live) if live else None
        store.begin(dice.randrange(20), parent, tokens=dice.choice([32, 32, 3]))
    elif choice < 0.75 and live:
        store.fill(dice.choice(begun), layers=dice.choice([1, 2]))
    elif choice < 0.85 and live:
        page = dice.choice(live)
        store.catalog.pins.hold([page], store.now)
        pinned.append(page)
    elif choice < 0.95 and pinned:
        store.catalog.pins.release([pinned.pop(dice.randrange(len(pinned)))])
    elif live:
        store.catalog.fail(dice.choice(begun), store.now)
    store.now += dice.choice([0, 1, 20])
    store.catalog.sweep(store.now)


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_keep_every_slot_accounted_for(seed: int) -> None:
    store, pinned, dice = Store(slots=12), list[Page](), random.Random(seed)
    for _ in range(400):
        _random_step(store, pinned, dice)
        store.check()
    assert all(store.shelf.arena.is_current(page.ref) for page in pinned)


def test_many_slots_are_made_free_at_once_children_before_their_parents(store: Store) -> None:
    chain: list[Page] = []
    for number in range(store.shelf.arena.slots):
        chain.append(store.put(number, parent=chain[-1] if chain else None))
    store.catalog.pins.hold([chain[0]], store.now)
    refs = store.catalog.grant(store.writers[0], store.shelf, 3, store.now)
    assert {ref.slot for ref in refs} == {page.ref.slot for page in chain[-3:]}
    assert not any(store.shelf.arena.is_current(page.ref) for page in chain[-3:])
    assert store.present(*range(len(chain))) == [True] * (len(chain) - 3) + [False] * 3
    assert store.catalog.counts["pages_evicted"] == 3
    store.check()
    everything = store.catalog.grant(store.writers[0], store.shelf, len(chain), store.now)
    assert len(everything) == len(chain) - 4, "one is pinned, three are granted"
    assert store.present(0) == [True]
    store.check()


def test_of_another_formats_pages_no_more_go_than_must() -> None:
    store = Store(slots=4)
    large = store.catalog.room.shelf(msgspec.structs.replace(FORMAT, page_tokens=2 * FORMAT.page_tokens))
    for number in range(4):
        store.put(number)
    (ref,) = store.catalog.grant(store.writers[0], large, 1, store.now)
    assert large.arena.is_current(ref)
    assert store.present(*range(4)) == [False, False, True, True]
    store.check()


@pytest.mark.slow
def test_ten_thousand_pages_go_through_a_small_store_while_pinned_ones_stay() -> None:
    store = Store(slots=256)
    kept = [store.put(number) for number in range(100)]
    for page in kept:
        store.catalog.pins.hold([page], store.now)
    for number in range(100, 10_100):
        store.put(number)
    assert all(store.present(*range(100)))
    assert store.present(*range(10_100 - 156, 10_100)) == [True] * 156
    assert store.catalog.counts["pages_evicted"] == 10_000 - 156
    store.check()


def test_a_warm_slot_is_preferred_to_one_that_would_take_memory(store: Store) -> None:
    page = store.begin(1)
    assert page
    store.catalog.fail(page, store.now)
    store.catalog.sweep(store.now)
    store.put(2)
    assert store.shelf.resident == 1
    assert isinstance(store.shelf, Shelf)
