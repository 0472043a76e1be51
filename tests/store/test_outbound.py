"""Pushes to one peer share a link, and not their fates: what ends one of them leaves the others alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.config import StoreConfig
from kvrelay.errors import Overloaded
from kvrelay.protocol.client import OpenTransfer
from kvrelay.types import Transport
from tests.patience import until
from tests.store.conftest import page_name
from tests.store.test_paths import CONTROL, Ends, arrived


async def test_a_push_whose_writer_dies_while_the_peer_is_dialled_costs_the_others_nothing(tmp_path: Path) -> None:
    ends = Ends(tmp_path, CONTROL)
    await ends.ready()
    p, d = ends.p, ends.d
    other = p.keeper.join("other", p.now)
    lost = OpenTransfer(transfer="lost", names=[page_name(9)], total_tokens=8, push_to=d.address)
    p.daemon.peers.open(other, lost, p.shelf(), p.now)
    p.put(0)
    p.push("t", [0], 8, d)
    p.keeper.leave(other, p.now)
    await until(lambda: arrived(d, [0]))
    await ends.settled()
    assert p.keeper.counts["pushes_failed"] == p.keeper.counts["transfers_failed"] == 1
    assert d.keeper.transfers.get("lost") is None
    await p.stop()
    await d.stop()


async def test_what_is_wrong_with_a_peer_is_told_though_others_are_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(tmp_path, CONTROL)
    await ends.ready()
    peers = ends.p.daemon.peers
    peers._config = StoreConfig(transports=(Transport.TCP,))
    gone = ["127.0.0.1:1", "127.0.0.1:2"]
    for address in gone:
        link = peers.link(address)
        await until(lambda link=link: link.is_over)  # type: ignore[misc]
    peers.link(ends.d.address)
    problems = {report.peer: report.problem for report in peers.reports}
    assert [problems[address].partition(":")[0] for address in gone] == ["cannot connect to 127.0.0.1"] * 2
    peers.meet([ends.d.address])
    assert {report.peer for report in peers.reports} == {ends.d.address}
    monkeypatch.setattr("kvrelay.store.peers.MAX_PEERS", 1)
    with pytest.raises(Overloaded):
        peers.link(gone[0])
    await ends.p.stop()
    await ends.d.stop()


async def test_links_that_are_over_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(tmp_path, CONTROL)
    await ends.ready()
    peers = ends.p.daemon.peers
    monkeypatch.setattr("kvrelay.store.peers.MAX_PEERS", 1)
    lost = peers.link("127.0.0.1:1")
    await until(lambda: lost.is_over)
    assert peers.link(ends.d.address) is peers.link(ends.d.address)
    await ends.p.stop()
    await ends.d.stop()
