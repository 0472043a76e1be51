"""Pushes to one peer share a link, and not their fates: what ends one of them leaves the others alone."""

from __future__ import annotations

from pathlib import Path

from kvrelay.protocol.client import OpenTransfer
from tests.store.conftest import page_name
from tests.store.test_paths import CONTROL, Ends, arrived, eventually


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
    await eventually(lambda: arrived(d, [0]))
    await ends.settled()
    assert p.keeper.counts["pushes_failed"] == p.keeper.counts["transfers_failed"] == 1
    assert d.keeper.transfers.get("lost") is None
    await p.stop()
    await d.stop()
