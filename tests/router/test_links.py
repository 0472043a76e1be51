"""Stores learn from the router where the others are, and everybody sees how they reach one another."""

from __future__ import annotations

import asyncio

from kvrelay.protocol.client import LinkReport
from kvrelay.protocol.feed import Heartbeat, Neighbours, TransferEvent
from kvrelay.types import Stage, Transport
from tests.fleet.values import store
from tests.patience import until
from tests.router.cluster import Cluster


async def test_a_store_is_told_where_the_others_are_whenever_that_changes(cluster: Cluster) -> None:
    first = await cluster.dial(store("s1", "127.0.0.1:9001"))
    await cluster.join(store("s2", "127.0.0.1:9002"))
    await first.send(Heartbeat(name="s1", incarnation=first.info.incarnation, healthy=True))
    while not isinstance(told := await first.link.recv(), Neighbours):
        pass  # it is asked for its pages as well
    assert told.addresses == ["127.0.0.1:9002"]


async def test_the_ways_of_a_store_show_by_pair_and_transport(cluster: Cluster) -> None:
    await cluster.join(store("s2", "127.0.0.1:9002"))
    first = await cluster.dial(store("s1", "127.0.0.1:9001"))
    ways = [
        LinkReport(peer="127.0.0.1:9002", transport=Transport.TCP, rank=1, bytes_per_s=2e9, latency_s=0.0003),
        LinkReport(peer="127.0.0.1:9009", transport=Transport.NIXL, problem="the peer does not offer it"),
    ]
    await first.send(Heartbeat(name="s1", incarnation=first.info.incarnation, healthy=True, links=ways))
    await until(lambda: any(member.ways for member in cluster.router.brain.fleet.stores))
    tcp = '{peer="s2",store="s1",transport="tcp"}'
    assert await cluster.metric(f"kvrelay_link_rank{tcp}") == 1
    assert await cluster.metric(f"kvrelay_link_bytes_per_second{tcp}") == 2e9
    assert await cluster.metric(f"kvrelay_link_latency_seconds{tcp}") == 0.0003
    assert await cluster.metric('kvrelay_link_rank{peer="127.0.0.1:9009",store="s1",transport="nixl"}') == 0


async def test_a_heartbeat_behind_many_milestones_is_soon_heard_by_a_loop_with_much_else_to_do(
    cluster: Cluster,
) -> None:
    member = await cluster.dial(store("s1", "127.0.0.1:9001"))
    beat = Heartbeat(name="s1", incarnation=member.info.incarnation, healthy=True, counts={"here": 1})
    events = [TransferEvent(store="s1", transfer="unknown", stage=Stage.STARTED)] * 400
    for message in (*events, beat):
        await member.send(message)
    turns = 0
    while not any("here" in known.counts for known in cluster.router.brain.fleet.stores):
        turns += 1
        await asyncio.sleep(0)
    assert turns < len(events) / 2
