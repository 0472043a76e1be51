"""What a store says of its ways to peers that it cannot reach: the reason, while they belong to the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.types import Transport
from tests.held_port import held_port
from tests.patience import until
from tests.store.test_paths import Ends


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    pair = Ends(tmp_path, Transport.TCP)
    await pair.ready()
    yield pair
    await pair.p.stop()
    await pair.d.stop()


def problems(ends: Ends) -> list[str]:
    return [report.problem for report in ends.p.daemon.peers.reports]


async def test_a_peer_that_nobody_answers_for_is_reported_with_the_reason(ends: Ends) -> None:
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        ends.p.daemon.peers.meet([address])
        assert problems(ends) == ["the peer is being dialled"]
        await until(lambda: f"cannot connect to {address}" in "".join(problems(ends)))


async def test_a_peer_that_vanished_is_reported_until_it_is_no_neighbour_any_more(ends: Ends) -> None:
    ends.p.daemon.peers.meet([ends.d.address])
    await until(lambda: any(report.rank for report in ends.p.daemon.peers.reports))
    await ends.d.stop()
    await until(lambda: "store-d" in "".join(problems(ends)))
    ends.p.daemon.peers.meet([])
    assert problems(ends) == []
