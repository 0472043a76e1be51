"""Records of transfers: what each milestone adds, in whatever order they come."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvrelay.fleet.record import MAX_FAILURE_CHARS, TransferRecord
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage, Transport

RECORD = TransferRecord(transfer="r/0/0", prompt_tokens=64)


def event(stage: Stage, **more: Any) -> TransferEvent:
    return TransferEvent(store="s", transfer="r/0/0", stage=stage, **more)


STARTED = event(Stage.STARTED, tokens=64)
SENT = event(Stage.SENT, late_bytes=50, moving_s=1e-6, retries=1)
ARRIVED = event(Stage.ARRIVED, transport=Transport.TCP, bytes=1000, pages=2, runs=3, seconds=0.8, tokens=64)
LOADED = event(Stage.LOADED, tokens=63)


def test_two_stores_tell_their_halves_in_any_order() -> None:
    moments = {Stage.STARTED: 0.5, Stage.SENT: 1.5, Stage.ARRIVED: 1.6, Stage.LOADED: 1.7}
    for order in itertools.permutations((STARTED, SENT, ARRIVED, LOADED)):
        record = RECORD.computed(1.25)
        for each in order:
            record = record.after(each, moments[each.stage])
        assert record.report() == {
            "transfer": "r/0/0",
            "outcome": "arrived",
            "transport": "tcp",
            "bytes": 1000,
            "late_bytes": 50,
            "pages": 2,
            "runs": 3,
            "retries": 1,
            "loaded_tokens": 63,
            "moving_s": 1e-6,
            "gb_per_s": pytest.approx(1.0),
            "hidden_s": pytest.approx(0.75),
            "exposed_s": pytest.approx(0.45),
        }


@pytest.mark.parametrize(
    ("started", "computed", "loaded", "hidden", "exposed"),
    [(1.0, 2.0, 2.5, 1.0, 0.5), (1.0, 2.0, 1.5, 0.5, 0.0), (2.0, 2.0, 3.0, 0.0, 1.0), (3.0, 2.0, 2.5, 0.0, 0.5)],
)
def test_what_lies_after_the_prefill_is_exposed_and_the_rest_is_hidden(
    started: float, computed: float, loaded: float, hidden: float, exposed: float
) -> None:
    record = RECORD.after(STARTED, started).computed(computed).after(LOADED, loaded)
    assert (record.hidden_s, record.exposed_s) == (hidden, exposed)


def test_nothing_is_said_of_times_whose_ends_are_not_known() -> None:
    for record in (RECORD, RECORD.after(LOADED, 1.0), RECORD.after(STARTED, 1.0).computed(2.0)):
        assert (record.hidden_s, record.exposed_s) == (None, None)
    assert RECORD.after(LOADED, 2.0).computed(1.0).hidden_s is None
    assert "transport" not in RECORD.report()


def test_what_shares_a_store_has_no_speed() -> None:
    record = RECORD.after(event(Stage.ARRIVED, tokens=64), 1.0)
    assert (record.gb_per_s, record.report()["transport"], record.late_bytes) == (None, "local", 0)


def test_the_first_reason_of_a_failure_is_kept_and_its_length_is_bounded() -> None:
    record = RECORD.after(event(Stage.FAILED, reason="x" * 1000), 1.0).after(event(Stage.FAILED, reason="y"), 2.0)
    assert (record.outcome, record.failure) == ("failed", "x" * MAX_FAILURE_CHARS)
    assert RECORD.after(event(Stage.FAILED), 1.0).outcome == "failed"
    assert RECORD.outcome == "open"


def test_a_lost_p_fails_what_is_open_and_nothing_else() -> None:
    assert RECORD.lost("p is gone").failure == "p is gone"
    assert RECORD.after(ARRIVED, 1.0).lost("p is gone").outcome == "arrived"
    assert RECORD.after(event(Stage.FAILED, reason="no room"), 1.0).lost("p is gone").failure == "no room"


def test_an_attempt_at_another_p_is_a_retry() -> None:
    record = TransferRecord(transfer="r/0/1", prompt_tokens=64, attempt=1)
    assert record.after(SENT, 1.0).report()["retries"] == 2
