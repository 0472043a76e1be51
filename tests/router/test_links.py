"""Stores learn from the router where the others are, and everybody sees how they reach one another."""

from __future__ import annotations

from kvrelay.protocol.client import LinkReport
from kvrelay.protocol.feed import Heartbeat, Neighbours
from kvrelay.types import Transport
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
