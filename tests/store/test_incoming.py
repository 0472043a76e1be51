"""One push as its receiver keeps book of it, without a socket: what a sender claims costs it no pin, and no memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvrelay.config import StoreConfig
from kvrelay.errors import Malformed
from kvrelay.protocol.client import NewPage
from kvrelay.protocol.feed import TransferEvent
from kvrelay.protocol.peer import Segments
from kvrelay.store.arena import SlotState, checksums
from kvrelay.store.elsewhere import MAX_OFFERS
from kvrelay.store.incoming import Incoming
from kvrelay.store.keeper import Keeper
from kvrelay.store.landing import Landing
from kvrelay.store.page import Writer
from kvrelay.store.transfers import Way
from kvrelay.store.wanted import Wanted
from kvrelay.types import Codec, Stage
from tests.store.conftest import FORMAT, STRIDE, manifest, page_name, payload

SEGMENT = FORMAT.segment_bytes
LAYERS = range(FORMAT.layers)


class Receiver:
    """A store to which a prompt of whole pages is pushed, told by hand what its link received."""

    def __init__(self, pages: int, codec: Codec = Codec.RAW, slots: int = 64) -> None:
        self.events: list[TransferEvent] = []
        self.keeper = Keeper("d", StoreConfig(arena_bytes=slots * STRIDE), 1, self.events.append)
        self.writer = self.keeper.join("peer p", 0.0)
        self.incoming = self.push("t", range(pages), codec)

    def push(self, id: str, numbers: Sequence[int], codec: Codec = Codec.RAW) -> Incoming:
        """A peer opens a push of these."""
        shelf, names = self.keeper.room.shelf(FORMAT), [page_name(number) for number in numbers]
        transfer = self.keeper.open_transfer(id, self.writer, names, len(names) * 8, shelf, Way.IN, 0.0)
        assert transfer is not None
        return Incoming(transfer, shelf, names, len(names) * 8, self.keeper, self.writer, lends=False, codec=codec)

    def land(self, *parts: tuple[int, int], damaged: Sequence[tuple[int, int]] = ()) -> Landing:
        """The bytes of a batch of (page, layer) are in, some of them damaged, and not verified yet."""
        segments = [memoryview(payload(page))[layer * SEGMENT :][:SEGMENT] for page, layer in parts]
        items = [(page, layer, checksums(part, SEGMENT)) for (page, layer), part in zip(parts, segments, strict=True)]
        message = Segments(transfer="t", manifest=manifest(*items), payload_bytes=SEGMENT * len(parts))
        landing = self.incoming.land(message)
        data = bytearray().join(segments)
        for part in damaged:
            data[parts.index(part) * SEGMENT] ^= 1
        landing.fill(memoryview(data), are_rounded=False)
        return landing

    def receive(self, *parts: tuple[int, int], damaged: Sequence[tuple[int, int]] = (), now: float = 0.0) -> list[int]:
        """A batch comes in; the pages that are given up for it."""
        landing = self.land(*parts, damaged=damaged)
        given_up = [page for piece in landing.pieces() for page in self.incoming.verify(landing, piece, now)]
        self.incoming.landed(landing)
        return given_up

    def has(self, *numbers: int) -> None:
        """These are here already, the ones before others used before them."""
        shelf = self.keeper.room.shelf(FORMAT)
        refs = self.keeper.catalog.grant(self.writer, shelf, len(numbers), 0.0)
        for number, ref in zip(numbers, refs, strict=True):
            self.keeper.begin(self.writer, NewPage(page_name(number), ref, 8), None, 0.0)
            for layer in LAYERS:
                shelf.arena.publish(ref, layer, 0)
        self.keeper.progress(0.0)

    def receive_all(self, offered: list[int]) -> None:
        """A sender offers these, and sends what is wanted of them."""
        wanted = self.incoming.want(offered, 1, 0.0).pages
        if wanted:
            self.receive(*[(page, layer) for page in wanted for layer in LAYERS])

    def somebody_fills(self, number: int) -> Writer:
        """Another writer begins a page."""
        writer = self.keeper.join("peer q", 0.0)
        (ref,) = self.keeper.catalog.grant(writer, self.keeper.room.shelf(FORMAT), 1, 0.0)
        self.keeper.begin(writer, NewPage(page_name(number), ref, 8), None, 0.0)
        return writer

    @property
    def stages(self) -> list[Stage]:
        return [event.stage for event in self.events]

    def states(self, *numbers: int) -> list[SlotState | None]:
        pages = [self.keeper.catalog.find(page_name(number)) for number in numbers]
        return [None if page is None else page.state for page in pages]

    def end(self, now: float) -> None:
        self.incoming.end("", now)
        self.keeper.leave(self.writer, now, quarantine_s=0)
        self.keeper.check_invariants()
        assert self.keeper.catalog.pins.pinned == 0


def test_a_page_that_is_offered_again_is_pinned_once() -> None:
    receiver = Receiver(2)
    assert receiver.incoming.want([0, 1], 1, 0.0).pages == [0, 1]
    page = receiver.keeper.catalog.find(page_name(0))
    assert page is not None
    receiver.keeper.catalog.fail(page, 0.0)
    assert receiver.incoming.want([0, 1], 1, 0.0).pages == []
    receiver.end(1.0)


def test_room_for_the_rest_of_a_prompt_is_not_made_by_evicting_what_is_here_of_it() -> None:
    receiver = Receiver(6, slots=8)
    receiver.has(0, 1, 2, 10, 11, 12, 13, 14)
    assert receiver.incoming.want([*range(6)], 1, 0.0).pages == [3, 4, 5]
    assert receiver.states(0, 1, 2) == [SlotState.COMPLETE] * 3
    assert receiver.states(10, 11, 12, 13, 14) == [None] * 3 + [SlotState.COMPLETE] * 2
    assert receiver.incoming.want([0, 1, 2], 1, 0.0).pages == []
    receiver.end(1.0)


def test_pages_that_have_yet_to_be_offered_are_kept_while_room_is_made_for_those_before_them() -> None:
    receiver = Receiver(6, slots=8)
    receiver.has(3, 4, 5, 10, 11, 12, 13, 14)
    receiver.incoming.begin(0.0)
    assert receiver.incoming.want([0, 1, 2], 1, 0.0).pages == [0, 1, 2]
    assert receiver.states(3, 4, 5) == [SlotState.COMPLETE] * 3
    assert receiver.states(10, 11, 12, 13, 14) == [None] * 3 + [SlotState.COMPLETE] * 2
    assert receiver.incoming.want([3, 4, 5], 1, 0.0).pages == []
    receiver.end(1.0)


def test_room_for_the_rest_of_a_prompt_is_not_made_by_evicting_what_was_received_of_it() -> None:
    receiver = Receiver(6, slots=4)
    receiver.incoming.begin(0.0)
    receiver.receive_all([0, 1, 2, 3])
    assert receiver.incoming.want([4, 5], 1, 0.0).pages == []
    assert receiver.states(0, 1, 2, 3) == [SlotState.COMPLETE] * 4
    assert receiver.stages == [Stage.FAILED]
    receiver.end(1.0)


def test_a_push_that_arrives_has_all_its_pages_whatever_room_another_wants_meanwhile() -> None:
    receiver = Receiver(4, slots=6)
    receiver.incoming.begin(0.0)
    receiver.receive_all([0, 1, 2])
    other = receiver.push("u", range(50, 55))
    other.begin(0.0)
    assert other.want([0, 1], 1, 0.0).pages == [0, 1]
    receiver.receive_all([3])
    assert receiver.stages == [Stage.ARRIVED]
    assert receiver.states(0, 1, 2, 3) == [SlotState.COMPLETE] * 4
    other.end("broken", 1.0)
    receiver.end(1.0)


def test_of_two_pushes_that_share_a_full_store_the_one_that_gives_up_makes_room_for_the_other() -> None:
    receiver = Receiver(4, slots=6)
    receiver.incoming.begin(0.0)
    receiver.receive_all([0, 1, 2])
    other = receiver.push("u", range(50, 55))
    other.begin(0.0)
    assert other.want([0, 1, 2], 1, 0.0).pages == [0, 1, 2]
    assert receiver.incoming.want([3], 1, 0.0).pages == []
    assert receiver.stages == [Stage.FAILED]
    assert other.want([3, 4], 1, 0.0).pages == [3, 4]
    receiver.incoming.end("", 0.0)
    receiver.incoming = other
    receiver.receive(*[(page, layer) for page in range(5) for layer in LAYERS])
    assert receiver.stages == [Stage.FAILED, Stage.ARRIVED]
    receiver.end(1.0)


def test_what_was_received_is_held_no_longer_than_the_push_may_arrive() -> None:
    receiver = Receiver(2)
    receiver.incoming.begin(0.0)
    receiver.receive_all([0])
    assert receiver.keeper.catalog.pins.pinned == 1
    receiver.keeper.tick(1000.0)
    assert receiver.stages == [Stage.FAILED]
    assert receiver.keeper.catalog.pins.pinned == 0, "its sender is silent, and its link still there"
    receiver.end(1000.0)


def test_the_copy_that_came_in_place_of_one_that_was_given_up_is_kept_and_the_other_is_not() -> None:
    receiver = Receiver(2, slots=3)
    other = receiver.somebody_fills(0)
    receiver.incoming.begin(0.0)
    (given_up,) = other.filling
    receiver.keeper.leave(other, 0.0, quarantine_s=0)
    assert given_up.pins == 1
    receiver.has(0)
    assert receiver.incoming.want([0], 1, 0.0).pages == []
    found = receiver.keeper.catalog.find(page_name(0))
    assert found is not None
    assert (given_up.pins, found.pins) == (0, 1)
    receiver.end(1.0)


def test_a_page_that_another_gave_up_comes_from_the_sender_that_has_yet_to_offer_it() -> None:
    receiver = Receiver(4)
    other = receiver.somebody_fills(3)
    receiver.receive_all([0, 1])
    receiver.keeper.leave(other, 0.0, quarantine_s=0)
    receiver.receive_all([2, 3])
    assert receiver.states(0, 1, 2, 3) == [SlotState.COMPLETE] * 4
    assert receiver.stages == [Stage.ARRIVED]
    receiver.end(0.0)


def test_a_page_that_another_gave_up_is_asked_for_again_from_the_sender_that_holds_it() -> None:
    receiver = Receiver(3)
    other = receiver.somebody_fills(1)
    assert receiver.incoming.want([0, 1, 2], 1, 0.0).elsewhere == [1]
    receiver.receive(*[(page, layer) for page in (0, 2) for layer in LAYERS])
    assert receiver.incoming.news() == ([], [])
    receiver.keeper.leave(other, 0.0, quarantine_s=0)
    assert receiver.stages == []
    assert receiver.incoming.news() == ([], [1])
    receiver.receive_all([1])
    assert receiver.stages == [Stage.ARRIVED]
    assert receiver.incoming.news() == ([], [])
    receiver.end(0.0)


def test_a_page_that_another_brought_is_held_no_longer() -> None:
    receiver = Receiver(2)
    receiver.somebody_fills(1)
    receiver.receive_all([0, 1])
    page = receiver.keeper.catalog.find(page_name(1))
    assert page is not None
    for layer in LAYERS:
        page.shelf.arena.publish(page.ref, layer, 0)
    receiver.keeper.progress(0.0)
    assert receiver.stages == [Stage.ARRIVED]
    assert receiver.incoming.news() == ([1], [])
    receiver.end(0.0)


def test_nothing_is_held_for_a_push_that_has_failed() -> None:
    receiver = Receiver(2)
    other = receiver.somebody_fills(1)
    receiver.receive_all([0, 1])
    receiver.keeper.transfers.fail(receiver.incoming.transfer, "planted", 0.0)
    receiver.keeper.leave(other, 0.0, quarantine_s=0)
    assert receiver.incoming.news() == ([1], [])
    receiver.end(0.0)


def test_a_page_whose_bringers_keep_dying_is_given_up() -> None:
    receiver = Receiver(2)
    receiver.receive_all([0])
    for offer in range(MAX_OFFERS):
        other = receiver.somebody_fills(1)
        is_held = offer < MAX_OFFERS - 1
        assert receiver.incoming.want([1], 1, 0.0).elsewhere == ([1] if is_held else [])
        receiver.keeper.leave(other, 0.0, quarantine_s=0)
        assert receiver.incoming.news() == ([], [1] if is_held else [])
    assert receiver.stages == [Stage.FAILED]
    receiver.end(0.0)


def test_a_page_that_another_gave_up_does_not_come_from_a_sender_that_is_through() -> None:
    receiver = Receiver(2)
    other = receiver.somebody_fills(1)
    receiver.receive_all([0])
    receiver.incoming.end("", 0.0)
    assert receiver.stages == []
    receiver.keeper.leave(other, 0.0, quarantine_s=0)
    assert receiver.stages == [Stage.FAILED]


def test_a_page_is_given_up_for_one_bad_part_beside_a_good_one_in_the_same_message() -> None:
    receiver = Receiver(2)
    receiver.incoming.want([0, 1], 1, 0.0)
    assert receiver.receive((0, 0), (1, 0), (0, 1), damaged=[(0, 1)]) == [0]
    assert receiver.states(0, 1) == [None, SlotState.FILLING]
    receiver.end(0.0)


def test_what_was_verified_of_a_batch_that_breaks_off_stays_and_the_rest_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.store.landing.PIECE_BYTES", 2 * SEGMENT)
    receiver = Receiver(2)
    receiver.incoming.want([0, 1], 1, 0.0)
    everything = [(page, layer) for page in (0, 1) for layer in LAYERS]
    landing = receiver.land(*everything)
    first = next(landing.pieces())
    assert receiver.incoming.verify(landing, first, 0.0) == []
    receiver.incoming.landed(landing)
    again = receiver.land(*everything, damaged=everything[first])
    assert again.taken.tolist() == [False, False, True, True, True, True]
    assert [receiver.incoming.verify(again, piece, 0.0) for piece in again.pieces()] == [[], [], []]
    receiver.incoming.landed(again)
    assert receiver.states(0, 1) == [SlotState.COMPLETE, SlotState.COMPLETE]
    receiver.end(0.0)


def test_a_page_that_is_given_up_between_two_pieces_of_a_batch_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.store.landing.PIECE_BYTES", SEGMENT)
    receiver = Receiver(1)
    (ref,) = receiver.incoming.want([0], 1, 0.0).slots
    landing = receiver.land(*[(0, layer) for layer in LAYERS], damaged=[(0, 0)])
    pieces = list(landing.pieces())
    assert receiver.incoming.verify(landing, pieces[0], 0.0) == [0]
    assert [receiver.incoming.verify(landing, piece, 0.0) for piece in pieces[1:]] == [[], []]
    assert not landing.arena.ready_layers(np.array([ref.slot]), np.array([ref.generation])).any()
    assert receiver.keeper.catalog.sweep(1.0) == 0, "bytes may still come into its slot"
    receiver.incoming.landed(landing)
    assert receiver.keeper.catalog.sweep(1.0) == 1
    receiver.end(1.0)


CLAIMS: dict[str, Segments] = {
    "more than its payload": Segments(transfer="t", manifest=manifest(*[(0, 0, [0])] * 1000), payload_bytes=SEGMENT),
    "more than is ever unpacked": Segments(
        transfer="t", manifest=manifest(*[(0, 0, [0])] * 100_000), payload_bytes=SEGMENT, codec=Codec.LOSSLESS
    ),
    "no checksum": Segments(transfer="t", manifest=manifest((0, 0, [])), payload_bytes=SEGMENT),
    "no checksum of what is unpacked": Segments(
        transfer="t", manifest=manifest((0, 0, [])), payload_bytes=SEGMENT - 1, codec=Codec.LOSSLESS
    ),
    "shards of less than a head": Segments(
        transfer="t", manifest=manifest((0, 0, [0] * (FORMAT.kv_heads + 1))), payload_bytes=SEGMENT
    ),
    "nothing": Segments(transfer="t", manifest=manifest(), payload_bytes=1),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_cannot_be_is_refused_before_anything_is_made_for_it(
    claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, made = Receiver(1, Codec.LOSSLESS), list[object]()
    receiver.incoming.want([0], 1, 0.0)
    monkeypatch.setattr("kvrelay.store.incoming.Landing", lambda *parts: made.append(parts))
    monkeypatch.setattr(Wanted, "take", lambda self, *parts: made.append(parts))
    with pytest.raises(Malformed):
        receiver.incoming.land(CLAIMS[claim])
    assert made == []
    receiver.end(0.0)
