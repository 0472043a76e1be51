"""Pushes to one peer take turns: one with much to send holds up none of the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.protocol.client import OpenTransfer
from kvrelay.store.batch import Batch
from kvrelay.store.batch_size import BatchSize
from kvrelay.store.outbound import WINDOW
from kvrelay.store.push import Push
from kvrelay.store.turns import Turns
from tests.patience import until
from tests.store.conftest import page_name
from tests.store.test_late_bytes import Sender
from tests.store.test_paths import BIG, CONTROL, Ends, Gate, Store, ends_of


def pushes(**are_bulk: bool) -> Turns:
    turns = Turns()
    for name, is_bulk in are_bulk.items():
        push = Sender(1, name).push
        push.is_bulk = is_bulk
        turns.add(push)
    return turns


def order(turns: Turns, count: int) -> str:
    """Who gets ``count`` batches, one place becoming free at a time, when all have something to send."""
    served = ""
    for _ in range(count):
        push: Push = next(iter(turns))
        served += push.transfer.id
        turns.served(push)
    return served


def test_pushes_are_served_one_after_the_other() -> None:
    assert order(pushes(a=False, b=False, c=False), 7) == "abcabca"


def test_bulk_copies_share_one_place_among_the_hand_offs() -> None:
    assert order(pushes(x=True, a=False, y=True, b=False, z=True), 10) == "xabyabzabx"


def test_bulk_copies_alone_are_served_one_after_the_other() -> None:
    assert order(pushes(x=True, y=True, z=True), 7) == "xyzxyzx"


@pytest.mark.parametrize(
    ("hand_offs", "bulk_copies", "idle", "places"), [(0, 0, 3, 0), (3, 0, 2, 3), (2, 5, 0, 3), (0, 5, 2, 1)]
)
def test_a_turn_is_as_many_batches_as_it_takes_to_come_round(
    hand_offs: int, bulk_copies: int, idle: int, places: int
) -> None:
    turns = Turns()
    for number, is_bulk in enumerate([False] * hand_offs + [True] * bulk_copies):
        sender = Sender(1, f"t{number}")
        sender.push.is_bulk = is_bulk
        sender.announce(0)
        sender.offer(0)
        turns.add(sender.push)
    for number in range(idle):
        turns.add(Sender(1, f"idle{number}").push)
    assert turns.places == places


def test_a_look_at_the_turns_outlives_their_changes() -> None:
    turns = pushes(a=False, b=False)
    seen = []
    for push in turns:
        seen.append(push.transfer.id)
        turns.remove(push)
    assert (seen, len(turns), turns.get("a")) == (["a", "b"], 0, None)


class Watched(Gate):
    """A path that notes whose batches it carries."""

    def __init__(self, path: Any, carried: list[str]) -> None:
        super().__init__(path)
        self.carried = carried

    async def carry(self, batch: Batch) -> int:
        self.carried.append(batch.message.transfer)
        return await super().carry(batch)


@pytest.fixture
async def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    monkeypatch.setattr("kvrelay.store.push.RAW_BATCH_BYTES", BIG.page_bytes)
    async with ends_of(tmp_path, CONTROL) as pair:
        await linked(pair)
        yield pair


async def linked(ends: Ends) -> None:
    await until(lambda: ends.p.link(ends.d)._paths is not None)


def push_bulk(store: Store, transfer: str, numbers: range, to: Store) -> None:
    names = [page_name(number) for number in numbers]
    opening = OpenTransfer(
        transfer=transfer, names=names, total_tokens=32 * len(numbers), push_to=to.address, final=True
    )
    store.daemon.peers.open(store.writer, opening, store.shelf(BIG), store.now)


@pytest.mark.parametrize("is_bulk", [True, False])
async def test_a_hand_off_of_one_page_does_not_wait_for_the_end_of_a_long_push(ends: Ends, is_bulk: bool) -> None:
    carried: list[str] = []
    gates: list[Watched] = []

    def watch(path: Any) -> Watched:
        gates.append(Watched(path, carried))
        return gates[-1]

    ends.replace(watch)
    many, one = range(5 * WINDOW), 5 * WINDOW
    for number in [*many, one]:
        ends.p.put(number, 32, format=BIG)
    if is_bulk:
        push_bulk(ends.p, "long", many, ends.d)
    else:
        ends.p.push("long", many, 32 * len(many), ends.d, BIG)
    await until(lambda: len(carried) == WINDOW)
    ends.p.push("short", [one], 32, ends.d, BIG)
    link = ends.p.link(ends.d)
    await until(lambda: any(push.transfer.id == "short" and push.is_sending for push in link._pushes))
    gates[0].open.set()
    await until(lambda: len(carried) == len(many) + 1)
    assert carried.index("short") <= WINDOW + 2
    await ends.settled()


class CountedSize(BatchSize):
    """Notes how many batches a turn was held to be."""

    def __init__(self) -> None:
        super().__init__(WINDOW)
        self.places: list[int] = []

    def took(self, seconds: float, places: int) -> None:
        self.places.append(places)
        super().took(seconds, places)


async def test_many_bulk_copies_do_not_make_batches_small(ends: Ends) -> None:
    gates: list[Watched] = []

    def watch(path: Any) -> Watched:
        gates.append(Watched(path, []))
        return gates[-1]

    ends.replace(watch)
    link = ends.p.link(ends.d)
    size = link._batch_size = CountedSize()
    copies, each = 3 * WINDOW, 3
    for number in range(copies * each):
        ends.p.put(number, 32, format=BIG)
    for copy in range(copies):
        push_bulk(ends.p, f"copy{copy}", range(copy * each, (copy + 1) * each), ends.d)
    await until(lambda: sum(push.is_sending for push in link._pushes) == copies)
    gates[0].open.set()
    await until(lambda: len(size.places) == copies * each)
    assert set(size.places) == {0, 1}
    await ends.settled()


async def test_what_is_sent_at_a_time_shrinks_while_batches_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.store.batch_size.LONGEST_TURN_S", 0.0)
    monkeypatch.setattr("kvrelay.store.batch_size.LEAST_BYTES", BIG.segment_bytes)
    async with ends_of(tmp_path, CONTROL) as ends:
        await linked(ends)
        sizes: list[int] = []

        class Weighed(Watched):
            async def carry(self, batch: Batch) -> int:
                sizes.append(batch.message.payload_bytes)
                return await super().carry(batch)

        def weigh(path: Any) -> Weighed:
            gate = Weighed(path, [])
            gate.open.set()
            return gate

        ends.replace(weigh)
        numbers = range(40)
        for number in numbers:
            ends.p.put(number, 32, format=BIG)
        ends.p.push("t", numbers, 32 * len(numbers), ends.d, BIG)
        await until(lambda: ends.d.keeper.counts["transfers_arrived"] == 1)
        assert sum(sizes) == len(numbers) * BIG.page_bytes
        assert sizes[-1] <= sizes[0] / 8
        await ends.settled()
