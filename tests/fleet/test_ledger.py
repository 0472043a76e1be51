"""Timelines: what is kept, for how long, and what is computed from it."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.fleet.ledger import Ledger, Timeline
from kvrelay.fleet.record import TransferRecord
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage, Transport


def records(**prompt_tokens: int) -> dict[str, TransferRecord]:
    return {name: TransferRecord(transfer=name, prompt_tokens=tokens) for name, tokens in prompt_tokens.items()}


def timeline(name: str = "r1", **events: float) -> Timeline:
    line = Timeline(name, "", 10.0)
    line.events |= events
    return line


@pytest.mark.parametrize(
    ("started", "computed", "loaded", "hidden", "exposed"),
    [(1.0, 2.0, 2.5, 1.0, 0.5), (1.0, 2.0, 2.0, 1.0, 0.0), (1.0, 2.0, 1.5, 0.5, 0.0), (2.0, 2.0, 3.0, 0.0, 1.0)],
)
def test_what_lies_after_the_prefill_is_exposed_and_the_rest_is_hidden(
    started: float, computed: float, loaded: float, hidden: float, exposed: float
) -> None:
    line = timeline(prefill_started=started, prefill_finished=computed, loaded=loaded)
    assert (line.hidden_s(), line.exposed_s()) == (hidden, exposed)


def test_what_is_not_known_is_left_out() -> None:
    report = timeline(loaded=3.0).report()
    nothing = {"transport": "local", "bytes": 0, "late_bytes": 0, "seconds": 0.0, "loaded_tokens": 0}
    assert report["transfer"] == nothing
    assert "transfers" not in report
    assert "transfer" not in timeline().report()
    assert "prefill_worker" not in timeline().report()
    assert "status" not in timeline().report()


def test_events_of_several_legs_keep_the_first_start_and_the_last_end() -> None:
    line = timeline()
    line.transfers = records(t1=7, t2=7)
    for transfer, now in (("t1", 11.0), ("t2", 12.0)):
        for stage in (Stage.STARTED, Stage.LAST_CHUNK, Stage.ARRIVED, Stage.LOADED):
            event = TransferEvent(store="s", transfer=transfer, stage=stage, bytes=5, seconds=now, tokens=7)
            line.note(event, now)
    assert line.events == {"received": 0.0, "prefill_started": 1.0, "last_chunk": 2.0, "arrived": 2.0, "loaded": 2.0}
    sums: Any = line.report()["transfer"]
    assert (sums["bytes"], sums["seconds"], sums["loaded_tokens"]) == (10, 12.0, 14)


def test_loads_of_the_same_pages_by_several_choices_are_not_added_up() -> None:
    line = timeline()
    line.transfers = records(t1=100, t2=50)
    for transfer, tokens in (("t1", 99), ("t1", 60), ("t2", 99), ("t1", 99), ("t2", 20), ("stranger", 9)):
        line.note(TransferEvent(store="s", transfer=transfer, stage=Stage.LOADED, tokens=tokens), 11.0)
    assert {name: record.loaded_tokens for name, record in line.transfers.items()} == {"t1": 99, "t2": 50}


def test_the_transfers_of_a_request_are_listed_and_summed_up() -> None:
    line = timeline(arrived=1.0)
    line.transfers = records(t1=64, t2=64, t3=64)
    for transfer, size in (("t1", 3_000_000), ("t2", 1_000_000), ("t3", 0)):
        by = Transport.TCP if size else Transport.LOCAL
        arrived = TransferEvent(store="d", transfer=transfer, stage=Stage.ARRIVED, transport=by, bytes=size)
        line.note(arrived, 11.0)
        line.note(
            TransferEvent(store="p", transfer=transfer, stage=Stage.SENT, late_bytes=size // 10, moving_s=size / 2e9),
            11.0,
        )
    report: Any = line.report()
    assert [(each["transfer"], each["transport"]) for each in report["transfers"]] == [
        ("t1", "tcp"),
        ("t2", "tcp"),
        ("t3", "local"),
    ]
    sums = report["transfer"]
    assert (sums["transport"], sums["bytes"], sums["late_bytes"]) == ("tcp", 4_000_000, 400_000)
    assert sums["gb_per_s"] == pytest.approx(2.0)


def test_the_last_requests_are_kept_and_their_transfers_with_them() -> None:
    ledger = Ledger(kept=2)
    for number in range(4):
        ledger.open(timeline(f"r{number}"))
        ledger.own(f"r{number}", f"t{number}", 10)
        ledger.over(f"r{number}")
    assert [ledger.get(f"r{number}") is not None for number in range(4)] == [False, False, True, True]
    assert [ledger.of_transfer(f"t{number}") is not None for number in range(4)] == [False, False, True, True]
    ledger.own("r0", "late", 10)
    assert ledger.of_transfer("late") is None
    assert repr(ledger) == "<Ledger 0 running, 2/2 over, 0/250 not begun, 2 transfers>"


def test_a_request_that_runs_is_kept_however_many_came_after_it() -> None:
    ledger = Ledger(kept=2)
    for number in range(5):
        ledger.open(timeline(f"r{number}"))
        ledger.own(f"r{number}", f"t{number}", 10)
    assert all(ledger.of_transfer(f"t{number}") is ledger.get(f"r{number}") is not None for number in range(5))
    for number in (4, 3, 2, 1):
        ledger.over(f"r{number}")
    assert [ledger.get(f"r{number}") is not None for number in range(5)] == [True, True, True, False, False]


def test_those_that_were_not_begun_are_kept_apart_from_the_others() -> None:
    ledger = Ledger(kept=2, kept_unstarted=3)
    ledger.open(timeline("served"))
    ledger.over("served")
    for number in range(5):
        ledger.keep_unstarted(timeline(f"refused {number}"))
    assert [ledger.get(f"refused {number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert ledger.get("served") is not None
    assert repr(ledger) == "<Ledger 0 running, 1/2 over, 3/3 not begun, 0 transfers>"
