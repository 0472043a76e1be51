"""Pages that the peer gets from others: their sender holds them, and sends those that did not come after all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.errors import Malformed
from kvrelay.protocol.client import NewPage
from kvrelay.protocol.peer import PushNews, PushWanted
from kvrelay.store.client import StoreClient
from kvrelay.store.elsewhere import MAX_OFFERS, Elsewhere
from kvrelay.store.transfers import Way
from tests.patience import LEEWAY, PATIENCE_S, RECOVERED_S, wait_until
from tests.store.conftest import FORMAT, StoreProcess, page_name, payload
from tests.store.test_client import is_idle, publish, take
from tests.store.test_late_bytes import LAYERS, Sender

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]


class Holder(Sender):
    """A sender of pages that are whole, told by hand what its peer says."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        for number in range(pages):
            self.publish(self.announce(number), LAYERS)

    def ask(self, wanted: list[int], elsewhere: list[int]) -> None:
        """It offers all that it has to offer, and the peer answers."""
        assert self.push.next_offer(0.0) is not None
        self.push.answer(PushWanted(transfer="t", indices=wanted, elsewhere=elsewhere), 0.0)

    def hear(self, over: list[int], lacking: list[int]) -> None:
        self.push.heard(PushNews(transfer="t", over=over, lacking=lacking), 0.0)

    def close(self) -> None:
        self.keeper.pushes.remove(self.push)
        assert self.keeper.catalog.pins.pinned == 0


def test_a_push_is_not_over_before_the_peer_has_what_others_were_bringing() -> None:
    sender = Holder(3)
    sender.ask([0], [1, 2])
    sender.send()
    assert not sender.push.is_done
    sender.hear([1], [])
    assert not sender.push.is_done
    sender.hear([2], [])
    assert sender.push.is_done
    sender.close()


def test_what_did_not_come_is_offered_again_and_sent() -> None:
    sender = Holder(3)
    sender.ask([0], [1, 2])
    sender.send()
    sender.hear([1], [2])
    offer = sender.push.next_offer(0.0)
    assert offer is not None
    assert offer.indices == [2]
    sender.push.answer(sender.wish(2), 0.0)
    sender.send()
    assert sender.push.is_done
    sender.close()


def test_a_page_that_was_given_up_here_ends_the_push_only_when_it_did_not_come_from_others() -> None:
    sender = Sender(2)
    sender.publish(sender.announce(0), LAYERS)
    sender.announce(1)
    assert sender.push.next_offer(0.0) is not None
    sender.push.answer(PushWanted(transfer="t", indices=[0], elsewhere=[1]), 0.0)
    sender.send()
    sender.keeper.catalog.lose(sender.writer, 1.0)
    assert not sender.push.problem
    sender.push.heard(PushNews(transfer="t", over=[], lacking=[1]), 0.0)
    assert "given up by its writer" in sender.push.problem
    sender.keeper.pushes.remove(sender.push)
    assert sender.keeper.catalog.pins.pinned == 0


def test_a_page_that_was_given_up_here_is_sent_from_another_copy_that_came_meanwhile() -> None:
    sender = Sender(1)
    sender.announce(0)
    assert sender.push.next_offer(0.0) is not None
    sender.push.answer(PushWanted(transfer="t", indices=[], elsewhere=[0]), 0.0)
    sender.keeper.catalog.lose(sender.writer, 1.0)
    sender.writer = sender.keeper.join("another", 1.0)
    sender.publish(sender.announce(0), LAYERS)
    sender.push.heard(PushNews(transfer="t", over=[], lacking=[0]), 1.0)
    assert not sender.push.problem
    sender.offer(0)
    sender.send()
    assert sender.push.is_done
    sender.keeper.pushes.remove(sender.push)
    assert sender.keeper.catalog.pins.pinned == 0


@pytest.mark.parametrize(
    ("wanted", "elsewhere"), [([0], [0]), ([], [2]), ([], [-1])], ids=["wanted", "not offered", "no page"]
)
def test_a_page_that_must_not_be_held_is_refused(wanted: list[int], elsewhere: list[int]) -> None:
    with pytest.raises(Malformed):
        Holder(2).ask(wanted, elsewhere)


@pytest.mark.parametrize(("over", "lacking"), [([0], []), ([1], [1]), ([1, 1], []), ([], [7])])
def test_news_of_what_is_not_held_is_refused(over: list[int], lacking: list[int]) -> None:
    sender = Holder(2)
    sender.ask([0], [1])
    with pytest.raises(Malformed):
        sender.hear(over, lacking)


def test_a_peer_cannot_have_a_page_offered_for_ever() -> None:
    sender = Holder(1)
    for _offer in range(MAX_OFFERS - 1):
        sender.ask([], [0])
        sender.hear([], [0])
    with pytest.raises(Malformed):
        sender.ask([], [0])


class Receiver:
    """A store into which another one pushes pages that a writer here is bringing, too."""

    def __init__(self) -> None:
        self.sender = Sender(2)
        self.keeper = self.sender.keeper
        names = [page_name(number) for number in range(2)]
        self.bring(0)
        peer = self.keeper.join("peer", 0.0)
        transfer = self.keeper.open_transfer("in", peer, names, 16, self.sender.shelf, Way.IN, 0.0)
        assert transfer is not None
        self.transfer = transfer
        self.elsewhere = Elsewhere(transfer)

    def bring(self, number: int) -> None:
        self.sender.writer = self.keeper.join("w", 0.0)
        self.sender.announce(number)

    def held(self) -> list[int]:
        """Pages that its peer is to hold after it offered the first one."""
        return self.elsewhere.hold([0], [self.keeper.catalog.find(page_name(0))])


def test_the_peer_holds_no_page_that_its_transfer_does_not_wait_for() -> None:
    receiver = Receiver()
    assert receiver.held() == [0]
    receiver.keeper.transfers.give_up(receiver.transfer, [page_name(0)], 0.0)
    assert receiver.elsewhere.news().over == [0]
    assert receiver.held() == []


def test_a_page_that_is_brought_anew_is_not_lacking_because_it_was_given_up_before() -> None:
    receiver = Receiver()
    receiver.keeper.catalog.lose(receiver.sender.writer, 1.0)
    receiver.bring(0)
    assert receiver.held() == [0]
    assert receiver.elsewhere.news() == ([], [])


def test_a_push_sends_what_a_store_that_died_was_bringing(start_store: Start, connect: Connect) -> None:
    """Three stores: the first is in the middle of a page when the second pushes the same prompt, and dies."""
    q, p, d = (start_store(f"store-{name}", 64) for name in "qpd")
    first, second = connect(q, "q/1", grant_slots=16), connect(p, "p/1", grant_slots=16)
    reader = connect(d, "d/1", grant_slots=0)
    names = [page_name(number) for number in range(3)]
    first.open_transfer("t1", names[:2], 16, d.address)
    (ref,) = take(first, 1)
    first.announce([NewPage(names[0], ref, 8)], "t1")
    publish(first, ref, payload(0), range(FORMAT.layers - 1))
    first.ring()
    wait_until(lambda: reader.describe()["pages_filling"] == 1)
    for number, name in enumerate(names):
        second.put(name, payload(number), 8)
    second.open_transfer("t2", names, 24, d.address)
    wait_until(lambda: all(reader.exists(names[1:])))
    assert second.describe()["transfers_open"] == 1
    q.kill()
    wait_until(lambda: reader.describe()["transfers_arrived"] == 1, within_s=LEEWAY * RECOVERED_S)
    assert [reader.get(name) for name in names] == [payload(number) for number in range(3)]
    wait_until(lambda: second.describe()["transfers_open"] == 0, within_s=PATIENCE_S)
    assert second.describe()["pages_pinned"] == 0
    wait_until(lambda: is_idle(reader))
