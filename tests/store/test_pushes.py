"""What becomes of pushes when a page of theirs is given up: they go on with another copy if they can."""

from __future__ import annotations

import pytest

from kvrelay.protocol.client import NewPage
from kvrelay.store.page import Writer
from kvrelay.types import SlotRef
from tests.store.conftest import page_name
from tests.store.test_late_bytes import LAYERS, SEGMENT, Sender


class TwoWriters(Sender):
    """Another writer fills the same pages."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.other = self.keeper.join("other", 0.0)

    def announce_again(self, number: int, shards: int = 1) -> SlotRef:
        (ref,) = self.keeper.catalog.grant(self.other, self.shelf, 1, 0.0)
        self.keeper.begin(self.other, NewPage(page_name(number), ref, 8, shards=shards), None, 0.0)
        return ref

    def lose(self, writer: Writer) -> None:
        """It is gone, and not the opener of the transfer: nothing but its pages fails."""
        self.keeper.catalog.lose(writer, 1.0)

    def close(self) -> None:
        self.keeper.pushes.remove(self.push)
        assert self.keeper.catalog.pins.pinned == 0
        self.keeper.catalog.sweep(1.0)
        self.keeper.check_invariants()


@pytest.mark.parametrize("step", ["before it is offered", "before it is asked for", "before it is sent"])
def test_a_page_of_which_nothing_was_sent_is_taken_from_its_other_writer(step: str) -> None:
    sender = TwoWriters(2)
    sender.announce(0)
    copy = sender.announce_again(0)
    kept = sender.announce_again(1)
    if step == "before it is sent":
        sender.offer(0, 1)
        assert sender.batch(1) is None
    elif step == "before it is asked for":
        assert sender.push.next_offer(0.0) is not None
    sender.lose(sender.writer)
    assert not sender.push.problem
    if step == "before it is asked for":
        sender.push.answer(sender.wish(0, 1), 0.0)
    elif step == "before it is offered":
        sender.offer(0, 1)
    sender.publish(copy, LAYERS)
    sender.publish(kept, LAYERS)
    batch = sender.batch(1)
    assert batch is not None
    assert set(batch.runs.slots.tolist()) == {copy.slot, kept.slot}
    assert batch.message.payload_bytes == 2 * len(LAYERS) * SEGMENT
    sender.push.settle(batch)
    assert sender.push.is_done
    sender.close()


def test_a_page_of_which_a_layer_was_sent_ends_the_push_with_its_writer() -> None:
    sender = TwoWriters(1)
    first = sender.announce(0)
    sender.announce_again(0)
    sender.offer(0)
    sender.publish(first, LAYERS[:1])
    assert sender.batch(1) is not None
    sender.lose(sender.writer)
    assert sender.push.problem
    sender.close()


def test_a_copy_of_other_shards_is_another_matter() -> None:
    sender = TwoWriters(1)
    sender.announce(0)
    sender.announce_again(0, shards=2)
    sender.offer(0)
    sender.lose(sender.writer)
    assert sender.push.problem
    sender.close()


def test_a_push_of_a_page_that_another_copy_overtook_hears_of_its_end() -> None:
    sender = TwoWriters(1)
    sender.announce(0)
    sender.offer(0)
    copy = sender.announce_again(0)
    sender.publish(copy, LAYERS)
    sender.lose(sender.writer)
    assert not sender.push.problem
    batch = sender.batch(1)
    assert batch is not None
    assert batch.runs.slots.tolist() == [copy.slot]
    sender.push.settle(batch)
    sender.close()


class NeverLookedThrough(dict[int, object]):
    """Pages by position, too many to be looked at one by one."""

    def values(self) -> object:  # type: ignore[override]
        raise AssertionError("a page was looked for among all others")


def test_a_page_is_found_among_many_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = TwoWriters(3)
    for number in range(3):
        sender.announce(number)
    pages = [sender.keeper.catalog.find(page_name(number)) for number in range(3)]
    spare = sender.announce_again(1)
    other = sender.keeper.catalog.in_slot(sender.shelf, spare)
    monkeypatch.setattr(sender.push, "_pages", NeverLookedThrough(sender.push._pages))
    assert other is not None
    assert [page is not None and sender.push.holds(page) for page in pages] == [True, True, True]
    assert not sender.push.holds(other)
