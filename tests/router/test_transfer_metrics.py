"""What a hand-off moved, as the timeline and the metrics tell it."""

from __future__ import annotations

import asyncio
from typing import Any

from kvrelay.types import Role, Stage, Transport
from tests.fleet.values import store
from tests.patience import until
from tests.router.cluster import Cluster
from tests.router.test_two_legs import prefill_leg

ARRIVED: dict[str, Any] = {
    "transport": Transport.TCP,
    "bytes": 3_000_000,
    "pages": 4,
    "runs": 5,
    "seconds": 0.5,
}


async def timeline(cluster: Cluster, request_id: str) -> dict[str, Any]:
    async with cluster.http.get(f"/kvrelay/requests/{request_id}") as response:
        told: dict[str, Any] = await response.json()
        return told


async def test_a_transfer_is_told_with_its_sizes_speed_and_what_was_late(cluster: Cluster) -> None:
    await cluster.join(store("s1", "127.0.0.1:9001"))
    await cluster.join(store("s2", "127.0.0.1:9002"))
    prefill = await cluster.add("p1", Role.PREFILL, store_name="s1")
    decode = await cluster.add("d1", Role.DECODE, store_name="s2")
    decode.hold.clear()
    asked = asyncio.create_task(cluster.post("/v1/completions", {"model": "tiny", "prompt": "Hello, you"}))
    await until(lambda: decode.in_flight == 1)
    transfer = prefill_leg(prefill.bodies()[0]).transfer
    await cluster.members["s1"].event(transfer, Stage.STARTED)
    await cluster.members["s1"].event(transfer, Stage.SENT, late_bytes=60_000, moving_s=0.002)
    await cluster.members["s2"].event(transfer, Stage.ARRIVED, **ARRIVED)
    await cluster.members["s2"].event(transfer, Stage.LOADED, tokens=3)
    brain = cluster.router.brain
    await until(lambda: _outcome_and_late(brain.ledger.of_transfer(transfer), transfer) == ("arrived", 60_000, True))
    decode.hold.set()
    _, _, headers = await asked

    told = await timeline(cluster, headers["x-request-id"])
    (record,) = told["transfers"]
    assert (record["transport"], record["bytes"], record["pages"], record["runs"]) == ("tcp", 3_000_000, 4, 5)
    assert (record["late_bytes"], record["retries"], record["gb_per_s"]) == (60_000, 0, 1.5)
    assert (told["transfer"]["transport"], told["transfer"]["gb_per_s"]) == ("tcp", 1.5)

    for name, value in (
        ("kvrelay_transfer_bytes_total", 3_000_000),
        ("kvrelay_transfer_late_bytes_total", 60_000),
        ("kvrelay_transfer_pages_total", 4),
        ("kvrelay_transfer_runs_total", 5),
        ("kvrelay_transfer_moving_seconds_total", 0.002),
        ("kvrelay_transfer_hidden_seconds_count", 1),
        ("kvrelay_transfer_exposed_seconds_count", 1),
    ):
        assert await cluster.metric(f'{name}{{transport="tcp"}}') == value, name
    assert await cluster.metric('kvrelay_transfers_total{outcome="arrived"}') == 1


def _outcome_and_late(line: Any, transfer: str) -> tuple[str, int, bool]:
    record = line.transfers[transfer]
    return record.outcome, record.late_bytes, record.loaded_at is not None


async def test_a_prompt_that_another_p_had_to_compute_is_one_failure_and_one_retry(cluster: Cluster) -> None:
    first, _ = await cluster.split()
    await cluster.add("p2", Role.PREFILL)
    first.refuse = 500
    _, _, headers = await cluster.post("/v1/completions", {"model": "tiny", "prompt": "Hello, you"})
    records = (await timeline(cluster, headers["x-request-id"]))["transfers"]
    assert [(record["outcome"], record["retries"]) for record in records] == [("failed", 0), ("open", 1)]
    assert records[0]["failure"] == "its prefill worker failed"
    assert await cluster.metric("kvrelay_transfer_retries_total") == 1
    assert await cluster.metric('kvrelay_transfers_total{outcome="failed"}') == 1


async def test_a_transfer_that_outlasts_its_request_is_counted_when_it_is_over(cluster: Cluster) -> None:
    await cluster.join(store("s1", "127.0.0.1:9001"))
    await cluster.join(store("s2", "127.0.0.1:9002"))
    prefill = await cluster.add("p1", Role.PREFILL, store_name="s1")
    await cluster.add("d1", Role.DECODE, store_name="s2")
    await cluster.complete()
    assert await cluster.metric("kvrelay_transfers_total") == 0
    transfer = prefill_leg(prefill.bodies()[0]).transfer
    await cluster.members["s2"].event(transfer, Stage.ARRIVED, **ARRIVED)
    ledger = cluster.router.brain.ledger
    await until(lambda: ledger.of_transfer(transfer).transfers[transfer].outcome == "arrived")  # type: ignore[union-attr]
    # How long its bytes moved is P's store to say.
    assert await cluster.metric("kvrelay_transfers_total") == 0
    await cluster.members["s1"].event(transfer, Stage.SENT, late_bytes=60_000, moving_s=0.002)
    await until(lambda: ledger.of_transfer(transfer).transfers[transfer].is_settled)  # type: ignore[union-attr]
    for _ in range(2):  # once, however often somebody scrapes
        assert await cluster.metric('kvrelay_transfers_total{outcome="arrived"}') == 1
        assert await cluster.metric('kvrelay_transfer_bytes_total{transport="tcp"}') == 3_000_000
        assert await cluster.metric('kvrelay_transfer_moving_seconds_total{transport="tcp"}') == 0.002
