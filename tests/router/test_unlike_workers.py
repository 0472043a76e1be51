"""A worker that nobody can exchange KV with is told by the router with the field's name, before any request."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.channel import bind_tcp
from kvrelay.cli import running
from kvrelay.cli.running import fleet_health
from kvrelay.types import Role
from tests.fleet.values import store
from tests.held_port import held_port
from tests.router.cluster import Cluster


async def test_health_metrics_and_doctor_name_the_field(cluster: Cluster) -> None:
    await cluster.split()
    await cluster.add("d-new", Role.DECODE, weights="w2")
    async with cluster.http.get("/health") as response:
        health = await response.json()
    assert health["status"] == "degraded"
    assert health["stranded"] == [{"worker": "d-new", "other": "p1", "reason": "fingerprint.weights"}]
    assert await cluster.metric('kvrelay_worker_stranded{field="fingerprint.weights",worker="d-new"}') == 1
    told = await asyncio.to_thread(fleet_health, cluster.url)
    assert told is not None
    assert "worker d-new exchanges KV with nobody: fingerprint.weights is not that of p1" in told.complaints[0]


async def test_a_doctor_has_no_complaint_of_two_revisions_that_each_have_their_pair(cluster: Cluster) -> None:
    await cluster.split()
    await cluster.add("p-new", Role.PREFILL, weights="w2")
    await cluster.add("d-new", Role.DECODE, weights="w2")
    told = await asyncio.to_thread(fleet_health, cluster.url)
    assert told is not None
    assert (told.status, told.complaints) == ("ok", [])


async def test_a_doctor_says_why_a_router_without_workers_is_unavailable(cluster: Cluster) -> None:
    await cluster.join(store())
    told = await asyncio.to_thread(fleet_health, cluster.url)
    assert told is not None
    assert told.complaints == [f"unavailable: {told.why}"]


def test_who_does_not_listen_or_never_answers_is_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_WAIT_S", 0.1)
    with bind_tcp("127.0.0.1", 0) as silent, held_port() as unused:
        for port in (silent.getsockname()[1], unused):
            assert fleet_health(f"http://127.0.0.1:{port}") is None
