"""How many bytes a push has still to move when the last layer of its prompt is there: no socket, no second store."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.config import StoreConfig
from kvrelay.protocol.client import NewPage
from kvrelay.protocol.feed import TransferEvent
from kvrelay.protocol.peer import PushWanted
from kvrelay.store.batch import Batch
from kvrelay.store.keeper import Keeper
from kvrelay.store.push import Push
from kvrelay.store.transfers import Way
from kvrelay.types import SlotRef
from tests.store.conftest import FORMAT, STRIDE, page_name

SEGMENT = FORMAT.segment_bytes
LAYERS = range(FORMAT.layers)


class Sender:
    """A store that pushes a prompt of whole pages, told by hand what its writer does and what its link sent."""

    def __init__(self, pages: int, transfer_id: str = "t") -> None:
        events: list[TransferEvent] = []
        self.keeper = Keeper("p", StoreConfig(arena_bytes=64 * STRIDE), 1, events.append)
        self.shelf = self.keeper.room.shelf(FORMAT)
        self.writer = self.keeper.join("w", 0.0)
        names = [page_name(number) for number in range(pages)]
        transfer = self.keeper.open_transfer(transfer_id, self.writer, names, pages * 8, self.shelf, Way.OUT, 0.0)
        assert transfer is not None
        self.push = Push(transfer, self.shelf, self.keeper.catalog)
        self.keeper.pushes.add(self.push, self.shelf, lambda: None, 0.0)

    def announce(self, number: int) -> SlotRef:
        (ref,) = self.keeper.catalog.grant(self.writer, self.shelf, 1, 0.0)
        self.keeper.begin(self.writer, NewPage(page_name(number), ref, 8), None, 0.0)
        return ref

    def publish(self, ref: SlotRef, layers: Iterable[int], *, is_heard: bool = True) -> None:
        for layer in layers:
            self.shelf.arena.publish(ref, layer, 0)
        if is_heard:
            self.keeper.progress(0.0)

    def wish(self, *wanted: int) -> PushWanted:
        return PushWanted(transfer=self.push.transfer.id, indices=list(wanted))

    def offer(self, *wanted: int) -> None:
        assert self.push.next_offer(0.0) is not None
        self.push.answer(self.wish(*wanted), 0.0)

    def batch(self, serial: int) -> Batch | None:
        return self.push.next_batch(serial, self.push.most_batch_bytes)

    def send(self) -> None:
        batch = self.batch(1)
        assert batch is not None
        self.push.settle(batch)


def test_what_was_sent_before_the_last_layer_is_not_late() -> None:
    sender = Sender(2)
    first, second = sender.announce(0), sender.announce(1)
    sender.offer(0, 1)
    for layer in LAYERS:
        sender.publish(first, [layer])
        sender.publish(second, [layer])
        sender.send()
    assert sender.push.is_done
    assert sender.push.passage.late_bytes == 2 * SEGMENT


def test_a_layer_that_is_sent_before_its_bell_is_heard_is_late_all_the_same() -> None:
    sender = Sender(1)
    ref = sender.announce(0)
    sender.offer(0)
    sender.publish(ref, LAYERS[:-1])
    sender.send()
    sender.publish(ref, LAYERS[-1:], is_heard=False)
    sender.send()
    sender.keeper.progress(0.0)
    assert sender.push.passage.late_bytes == SEGMENT


def test_a_page_that_the_peer_was_not_asked_about_in_time_is_late_as_a_whole() -> None:
    sender = Sender(2)
    sender.publish(sender.announce(0), LAYERS)
    sender.offer(0)
    sender.send()
    sender.publish(sender.announce(1), LAYERS)
    sender.offer(1)
    sender.send()
    assert sender.push.passage.late_bytes == len(LAYERS) * SEGMENT


def test_pages_that_are_not_wanted_are_never_late() -> None:
    sender = Sender(2)
    sender.publish(sender.announce(0), LAYERS)
    sender.publish(sender.announce(1), LAYERS)
    sender.offer()
    assert sender.push.is_done
    assert sender.push.passage.late_bytes == 0


def test_bytes_that_the_peer_did_not_say_to_have_taken_are_late() -> None:
    sender = Sender(1)
    ref = sender.announce(0)
    sender.offer(0)
    sender.publish(ref, LAYERS[:-1])
    on_its_way = sender.batch(1)
    assert on_its_way is not None
    sender.publish(ref, LAYERS[-1:])
    sender.push.settle(on_its_way)
    sender.send()
    assert sender.push.passage.late_bytes == len(LAYERS) * SEGMENT


def test_a_page_is_done_when_all_its_batches_were_taken_in_whatever_order() -> None:
    sender = Sender(1)
    ref = sender.announce(0)
    sender.offer(0)
    sender.publish(ref, LAYERS[:-1])
    first = sender.batch(1)
    sender.publish(ref, LAYERS[-1:])
    second = sender.batch(2)
    assert first is not None
    assert second is not None
    sender.push.settle(second)
    assert not sender.push.is_done
    sender.push.settle(first)
    assert sender.push.is_done
