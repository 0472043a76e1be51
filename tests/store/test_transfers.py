"""What routers are told of a transfer: as much of a foreign reason as an event may carry."""

from __future__ import annotations

from kvrelay.errors import Barred, Overloaded
from kvrelay.protocol.feed import TransferEvent
from kvrelay.protocol.frame import MAX_FRAME_BYTES, encode
from kvrelay.store.counts import Counts
from kvrelay.store.page import Writer
from kvrelay.store.transfers import MAX_REASON_LENGTH, Transfers, Way
from kvrelay.types import Stage
from tests.store.conftest import page_name


def test_a_reason_of_any_length_fits_an_event() -> None:
    events: list[TransferEvent] = []
    transfers = Transfers("s", Counts(), events.append, set)
    transfer = transfers.open("t", Writer("w"), [page_name(1)], 8, Way.IN, 0.0)
    assert transfer is not None
    reason = "why " * MAX_FRAME_BYTES
    transfers.fail(transfer, reason, 0.0)
    transfers.relay("unknown", Stage.FAILED, reason, 0, 0.0)
    assert [event.reason for event in events] == [reason[:MAX_REASON_LENGTH]] * 2
    assert all(len(encode(event)) < MAX_FRAME_BYTES for event in events)


def test_routers_hear_why_a_transfer_could_not_be_opened_and_whether_the_way_is_at_fault() -> None:
    events: list[TransferEvent] = []
    transfers = Transfers("s", Counts(), events.append, set)
    transfers.not_opened("a", Barred("no way there"), 0.0)
    transfers.not_opened("b", Overloaded("too many"), 0.0)
    assert [(event.transfer, event.stage, event.reason, event.unreachable) for event in events] == [
        ("a", Stage.FAILED, "no way there", True),
        ("b", Stage.FAILED, "too many", False),
    ]
