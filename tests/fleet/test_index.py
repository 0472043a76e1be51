"""The index as a whole: holders come, tell, fall silent and go, and never leave a phantom page."""

from __future__ import annotations

import random

from kvrelay.fleet.event_stream import REPAIR_S
from kvrelay.fleet.index import GUESS_S, PENDING_S, PageIndex, store_key
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import PageChange, PageEvents, PagesWanted
from kvrelay.types import Medium, PageName
from tests.fleet.values import names

HBM, MEMORY, DISK = Medium.HBM, Medium.MEMORY, Medium.DISK


class Holder:
    """A worker or store that tells an index what it has, over a link that may lose messages."""

    def __init__(self, index: PageIndex, name: str, incarnation: str = "i1") -> None:
        self.index, self.name, self.incarnation = index, name, incarnation
        self.log = PageLog(incarnation)
        self._wanted: PagesWanted | None = index.open(name, incarnation, 0.0)
        self.tell()

    def tell(self, now: float = 0.0) -> None:
        """Answer all questions, and tell all news."""
        while self._wanted is not None:
            reader = self.log.follow(self._wanted.after)
            self._wanted = None
            while (message := next(reader)) is not None:
                self._wanted = self.index.take(self.name, self.incarnation, message, now) or self._wanted
        self._reader = self.log.follow(self.log.sequence)

    def news(self, now: float = 0.0, *, lose: int = 0) -> None:
        """Tell what is new, without the first ``lose`` messages; questions stay open until ``tell``."""
        while (message := next(self._reader)) is not None:
            lose -= 1
            if lose < 0:
                self._wanted = self.index.take(self.name, self.incarnation, message, now) or self._wanted

    def change(self, stored: list[PageName], removed: list[PageName] | None = None, medium: Medium = HBM) -> None:
        self.log.remove(removed or [], medium)
        self.log.store(stored, medium)


def test_what_holders_tell_is_found_by_holder_and_medium() -> None:
    index = PageIndex()
    worker, store = Holder(index, "p1"), Holder(index, store_key("p1"))
    worker.change(names(1, 2, 3))
    store.change(names(1, 2), medium=MEMORY)
    store.change(names(3, 4), medium=DISK)
    worker.news()
    store.news()
    found = index.find(tuple(names(1, 2, 3, 4, 5)))
    assert found.leading() == {"p1": 3, store_key("p1"): 4}
    assert found.pages == 4
    assert found.at(store_key("p1"), media=[MEMORY]) == 2
    assert found.at(store_key("p1"), media=[DISK]) == 0
    assert found.at("p1", store_key("p1")) == 4
    assert found.at("nobody") == 0
    index.check_invariants()


def test_all_holders_at_once_have_what_each_of_them_has() -> None:
    for seed in range(50):
        dice, index = random.Random(seed), PageIndex()
        holders = [Holder(index, f"p{number}") for number in range(6)]
        chain = names(*range(1, 9))
        for holder in holders:
            for medium in (HBM, MEMORY):
                first = dice.randrange(9)
                holder.change(chain[: dice.randrange(9)], chain[first : first + 1], medium)
            holder.news()
        index.drop(dice.choice(holders).name)
        found = index.find(tuple(chain))
        one_by_one = {holder.name: found.at(holder.name) for holder in holders}
        assert found.leading() == {name: pages for name, pages in one_by_one.items() if pages}, seed
        index.check_invariants()


def test_a_gap_shows_at_its_first_event_and_is_repaired_by_telling_again() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(1, 2, 3))
    worker.news()
    worker.change([], removed=names(2))
    worker.news(lose=1)
    worker.change(names(4))
    assert index.gaps == 0
    worker.news()
    assert index.gaps == 1
    worker.tell()
    assert index.prefix("p1", "i1", names(1, 2)) == 1
    assert index.prefix("p1", "i1", names(4)) == 1
    assert index.gaps == 1


def test_a_holder_that_has_no_news_is_asked_again_for_what_was_lost() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(1))
    worker.news()
    worker.change(names(2))
    worker.news(lose=1)
    worker.change(names(3))
    worker.news(now=10.0)
    index.tick(10.1 + REPAIR_S)
    assert index.count("p1") == 0
    worker._wanted = index.wanted("p1", "i1", 10.1 + REPAIR_S)
    assert index.wanted("p1", "i1", 10.2 + REPAIR_S) is None, "it was asked a moment ago"
    worker.tell()
    assert index.count("p1") == 3
    assert index.wanted("p1", "i1", 99.0) is None


def test_a_gap_that_nobody_repairs_costs_the_holder_its_pages() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(1))
    worker.news()
    worker.change([], removed=names(1))
    worker.news(lose=1)
    worker.change(names(2))
    worker.news(now=10.0)
    index.tick(10.0 + REPAIR_S)
    assert index.prefix("p1", "i1", names(1)) == 1
    index.tick(10.1 + REPAIR_S)
    assert index.prefix("p1", "i1", names(1)) == 0
    worker.tell(now=20.0)
    assert index.prefix("p1", "i1", names(2)) == 1


def test_telling_again_never_brings_back_a_page_that_is_gone() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(1))
    worker.news()
    worker.change([], removed=names(1))
    worker.news()
    for message in worker.log.follow(0):
        if message is None:
            break
        index.take("p1", "i1", message, 0.0)
    assert index.find(names(1)).pages == 0


def test_a_new_incarnation_starts_empty_and_the_old_one_is_not_heard_any_more() -> None:
    index = PageIndex()
    old = Holder(index, "p1", "i1")
    old.change(names(1))
    old.news()
    new = Holder(index, "p1", "i2")
    assert index.find(names(1)).pages == 0
    old.change(names(2))
    old.news()
    new.change(names(3))
    new.news()
    assert index.stale == 1
    assert [index.find(names(number)).pages for number in (1, 2, 3)] == [0, 0, 1]
    forged = PageEvents(incarnation="i1", sequence=3, changes=[PageChange(HBM, [], names(4))])
    assert index.take("p1", "i2", forged, 0.0) is None
    assert index.find(names(4)).pages == 0


def test_a_holder_that_is_dropped_leaves_nothing_and_its_memory_comes_back() -> None:
    index = PageIndex()
    workers = [Holder(index, f"p{number}") for number in range(2)]
    for worker in workers:
        worker.change(names(*range(30_000)))
        worker.news()
    index.drop("p0")
    assert index.find(names(1)).leading() == {"p1": 1}
    index.keep_only([])
    assert index.find(names(1)).pages == 0
    for number in range(10):
        index.tick(float(number))
    assert len(index) == 0
    index.check_invariants()


def test_who_was_silent_and_speaks_again_is_asked_for_everything() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(1, 2))
    worker.news()
    index.drop("p1")
    worker.change(names(3))
    worker.news()
    assert index.find(names(3)).pages == 0
    worker.tell()
    assert index.find(names(1, 2, 3)).pages == 3


def test_a_cleared_cache_is_empty() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(*range(1000)))
    worker.news()
    worker.log.clear(HBM)
    worker.news()
    assert index.count("p1") == len(index) == 0


def test_the_number_of_names_is_bounded_whatever_is_told() -> None:
    index = PageIndex(limit=1000)
    worker = Holder(index, "p1")
    for begin in range(0, 10_000, 500):
        worker.change(names(*range(begin, begin + 500)))
        worker.news()
    assert (len(index), index.turned_away) == (1000, 9000)


# ---------------------------------------------------------------- what was sent


def test_memory_is_bounded_by_what_the_worker_can_hold() -> None:
    index = PageIndex()
    for number in range(0, 100_000, 2):
        index.add("p1", "i1", names(number, number + 1), limit=500)
    assert repr(index) == "<PageIndex 1 holders, 0 pages, 500 sent>"


def test_entries_die_with_the_incarnation() -> None:
    index = PageIndex()
    index.add("p1", "i1", names(1), limit=5)
    assert index.prefix("p1", "i2", names(1)) == 0
    index.add("p1", "i2", names(2), limit=5)
    assert (index.prefix("p1", "i2", names(1)), index.prefix("p1", "i1", names(1))) == (0, 0)
    index.drop("p1")
    assert index.prefix("p1", "i2", names(2)) == 0


def test_what_was_sent_counts_until_the_worker_reports_on_it() -> None:
    index = PageIndex()
    worker = Holder(index, "p1")
    worker.change(names(1, 2))
    worker.news()
    index.add("p1", "i1", names(1, 2, 3, 4), limit=100)
    assert index.prefix("p1", "i1", names(1, 2, 3, 4, 5)) == 4
    worker.change(names(3), removed=names(1))
    worker.news()
    assert index.prefix("p1", "i1", names(1, 2, 3)) == 0, "sent, reported gone since"
    assert index.find(names(4)).pages == 0, "a promise is no page"


def test_a_promise_is_forgotten_soon_when_the_worker_reports_and_late_when_it_never_does() -> None:
    index = PageIndex()
    Holder(index, "reports")
    for worker in ("reports", "silent"):
        index.add(worker, "i1", names(1), limit=100)
    index.tick(PENDING_S)
    index.tick(2 * PENDING_S)
    assert [index.prefix(worker, "i1", names(1)) for worker in ("reports", "silent")] == [0, 1]
    index.tick(GUESS_S)
    index.tick(2 * GUESS_S)
    assert index.prefix("silent", "i1", names(1)) == 0
