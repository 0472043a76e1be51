"""Tests of deploy/mock/page_store.py and handoff.py: hand-offs between stores of names, and their reports."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest

from kvrelay.deploy.mock.handoff import Handoffs, LoadLaw
from kvrelay.deploy.mock.page_store import MockStore
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.deploy.mock.wire import Wire
from kvrelay.protocol.engine import DecodeLeg, PrefillLeg
from kvrelay.protocol.feed import TransferEvent
from kvrelay.protocol.message import Message
from kvrelay.types import PageFormat, Stage, StoreInfo, Transport
from tests.deploy.mock.values import PAGE, sequence

FORM = PageFormat(layers=4, kv_heads=1, head_dim=1, dtype="bfloat16", page_tokens=PAGE)
LAW = LoadLaw(bytes_per_s=FORM.page_bytes, wait_s=5.0, hidden_after_tokens=PAGE)


class Net:
    """Two stores, a worker at each, and a clock that is moved by hand."""

    def __init__(self, room_pages: int = 100) -> None:
        self.now = 0.0
        self.events: list[TransferEvent] = []
        self.woken = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.near, self.far = (self._store(name, room_pages) for name in ("near", "far"))
        stores = {store.info.address: store for store in (self.near, self.far)}
        self.p, self.d = (self._worker(store, stores) for store in (self.near, self.far))

    def _store(self, name: str, room_pages: int) -> MockStore:
        capacity = room_pages * FORM.page_bytes
        info = StoreInfo(name=name, incarnation="i", address=f"{name}:1", capacity_bytes=capacity)
        wire = Wire(bytes_per_s=FORM.page_bytes, latency_s=0.125)
        return MockStore(info, FORM, wire=wire, later=self._later, emit=self._heard)

    def _worker(self, store: MockStore, stores: dict[str, MockStore]) -> Handoffs:
        return Handoffs(store, stores, FORM, LAW, owner=store.info.name, later=self._later, wake=self._wake)

    def _later(self, at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), call))

    def _heard(self, message: Message) -> None:
        assert isinstance(message, TransferEvent)
        self.events.append(message)

    def _wake(self) -> None:
        self.woken += 1

    def pass_time(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = until

    def stages(self, store: str = "") -> list[Stage]:
        return [event.stage for event in self.events if store in ("", event.store)]

    def compute(self, one: Sequence, tokens: int, seconds: float) -> None:
        """A step of P's engine that computes so many tokens of ``one``."""
        self.p.begins(one, one.computed + tokens)
        begun_s, self.now = self.now, self.now + seconds
        one.computed += tokens
        self.p.computed(one, begun_s, self.now)

    def decode(self, *transfers: str) -> Sequence:
        return sequence(10, leg=DecodeLeg(transfers=list(transfers)))


def pushed(prompt: int = 10) -> Sequence:
    """A prompt of three pages, the last one partial, that goes to the far store."""
    return sequence(prompt, leg=PrefillLeg(transfer="t", push_to="far:1"))


def test_a_handoff_reports_what_a_real_one_does_in_its_order() -> None:
    net, one = Net(), pushed()
    net.p.arrived(one, net.now)
    net.compute(one, 8, 4.0)
    net.compute(one, 2, 1.0)
    net.pass_time(10.0)
    assert net.stages() == [Stage.STARTED, Stage.LAST_CHUNK, Stage.ARRIVED, Stage.SENT]
    arrived, sent = net.events[2:]
    assert (arrived.store, sent.store) == ("far", "near")
    assert (arrived.tokens, arrived.pages, arrived.bytes) == (10, 3, 3 * FORM.page_bytes)
    assert arrived.transport is Transport.TCP
    # The wire carries a page a second. Of the two first ones a layer was left when they were computed (half a second),
    # and the last page, which was computed in a second, had to wait for that.
    assert sent.moving_s == pytest.approx(3 + 2 * 0.125)
    assert sent.late_bytes == FORM.page_bytes / 2
    assert arrived.seconds == pytest.approx(5.5 + 0.125)


def test_a_request_waits_for_its_pages_and_is_woken_when_they_are_there() -> None:
    net, one = Net(), pushed()
    net.p.arrived(one, net.now)
    waits = net.decode("t")
    assert net.d.find(waits, 0, net.now) is None
    net.compute(one, 10, 1.0)
    assert net.d.find(waits, 0, net.now) is None
    net.pass_time(4.5)
    assert net.woken == 1
    assert net.d.find(waits, 0, net.now) == 10
    waits.loaded_tokens = 10
    assert net.d.load_s(waits) == pytest.approx(1.0), "the pages before the last chunk were loaded meanwhile"
    net.d.loaded(waits)
    counts, size_bytes = net.far.counts(), 10 * FORM.layers * FORM.token_layer_bytes
    assert counts["restored_bytes"] == size_bytes
    assert counts["restore_us"] == round(1e6 * size_bytes / LAW.bytes_per_s)
    assert net.events[-1].stage is Stage.LOADED
    assert net.events[-1].tokens == 10


def test_pages_that_are_there_travel_no_more() -> None:
    net, one, again = Net(), pushed(), sequence(10, leg=PrefillLeg(transfer="u", push_to="far:1"))
    net.p.arrived(one, net.now)
    net.compute(one, 10, 1.0)
    net.pass_time(9.0)
    net.events.clear()
    net.p.arrived(again, net.now)
    assert [(event.stage, event.bytes, event.transport) for event in net.events if event.stage is Stage.ARRIVED] == [
        (Stage.ARRIVED, 0, Transport.LOCAL)
    ]
    assert net.d.find(net.decode("u"), 8, net.now) == 2


def test_pages_of_the_sender_go_at_once_and_the_rest_when_it_is_computed() -> None:
    net, one = Net(), pushed()
    net.near.put(one.names[:1])
    net.p.arrived(one, net.now)
    net.pass_time(1.5)
    assert net.d.find(net.decode(), 0, net.now) == PAGE
    one.computed = one.local_tokens = PAGE
    net.compute(one, 6, 1.0)
    net.pass_time(9.0)
    assert net.events[-1].stage is Stage.SENT
    assert net.far.depth(one.names) == 2


def test_with_one_store_nothing_travels() -> None:
    net, one = Net(), sequence(10, leg=PrefillLeg(transfer="t", push_to=None))
    net.p.arrived(one, net.now)
    net.compute(one, 10, 1.0)
    assert net.stages() == [Stage.STARTED, Stage.LAST_CHUNK, Stage.ARRIVED]
    assert net.events[-1].transport is Transport.LOCAL


def test_a_prefill_that_ends_early_fails_its_handoff_and_wakes_who_waits() -> None:
    net, one = Net(), pushed()
    net.p.arrived(one, net.now)
    net.compute(one, 4, 1.0)
    net.pass_time(3.0)
    waits = net.decode("t")
    assert net.d.find(waits, 0, net.now) is None
    net.p.ended(one, net.now)
    assert net.events[-1].stage is Stage.FAILED
    assert net.woken == 1
    assert net.d.find(waits, 0, net.now) == PAGE, "what came before is used"


def test_the_death_of_a_worker_fails_its_handoffs_and_no_others() -> None:
    net, one = Net(), pushed()
    net.p.arrived(one, net.now)
    net.far.fail_all("somebody else", "gone")
    assert Stage.FAILED not in net.stages()
    net.far.fail_all("near", "gone")
    assert net.stages() == [Stage.FAILED]
    net.compute(one, 10, 1.0)
    net.pass_time(9.0)
    assert Stage.ARRIVED not in net.stages()


def test_a_transfer_that_nobody_knows_is_waited_for_no_longer_than_was_said() -> None:
    net = Net()
    waits = net.decode("never heard of")
    assert net.d.find(waits, 0, net.now) is None
    net.pass_time(LAW.wait_s + 0.1)
    assert net.woken == 1
    assert net.d.find(waits, 0, net.now) == 0


def test_a_store_that_is_not_simulated_here_is_said_to_be_none() -> None:
    net, one = Net(), sequence(10, leg=PrefillLeg(transfer="t", push_to="elsewhere:1"))
    net.p.arrived(one, net.now)
    net.compute(one, 10, 1.0)
    net.p.ended(one, net.now)
    assert net.stages() == [Stage.FAILED, Stage.STARTED, Stage.LAST_CHUNK]


def test_the_least_recently_used_pages_make_room() -> None:
    net, one, two = Net(room_pages=3), sequence(8), sequence([9] * 8)
    net.near.put(one.names)
    net.near.put(two.names[:1])
    assert net.near.depth(one.names) == 2
    net.near.put(two.names)
    assert net.near.depth(one.names[1:]) == 1
    assert net.near.depth(two.names) == 0, "its first page was the oldest"
    assert net.near.counts()["pages_used"] == 3


def test_what_was_generated_goes_home_to_the_next_turns_prefill() -> None:
    net = Net()
    one = sequence(8, leg=DecodeLeg(transfers=[], home="near:1"))
    one.tokens += [9] * 5
    one.names += sequence(one.tokens).names[2:]
    one.computed = 12
    net.d.computed(one, 0.0, 0.0)
    net.d.ended(one, net.now)
    net.pass_time(9.0)
    assert net.near.depth(one.names[2:]) == 1
    assert net.near.depth(one.names) == 0, "the prompt's pages are there anyway, where P computed them"


@pytest.mark.parametrize(("room", "whole"), [(1, False), (2, True), (100, True)])
def test_nothing_is_reported_that_a_store_has_not_room_for(room: int, whole: bool) -> None:
    net, one = Net(room_pages=room), pushed()
    assert net.near.put(one.names[:1])
    assert one.tail is not None
    assert net.near.put([*one.names, one.tail]) is whole
    told = [name for each in net.near.log._held.values() for name in each]
    assert sorted(told) == sorted(net.near._pages)
    assert len(told) == min(room, 3)


def test_a_hand_off_larger_than_the_store_fails_and_is_not_said_to_have_arrived() -> None:
    net, one = Net(room_pages=2), pushed()
    net.p.arrived(one, net.now)
    net.compute(one, 10, 4.0)
    net.pass_time(10.0)
    assert Stage.ARRIVED not in net.stages()
    assert Stage.FAILED in net.stages()
