"""Tests of benchmarks/handoff_table.py: what is read from the figures, and that no miss is hidden."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.handoff_table import render, rows


def stage(exposed_ms: float, gap_p50_ms: float = 40.0, ttft_ms: float = 300.0) -> dict[str, Any]:
    spread = {"p50_ms": gap_p50_ms, "p99_ms": 90.0}
    load = {"gap": spread, "stream_ttft": {"p50_ms": ttft_ms}, "stream_itl": {"p50_ms": 20.0}}
    return {"exposed": {"3000": {"exposed_ms": exposed_ms}}, "load": load}


def test_stages_that_did_not_run_give_no_rows() -> None:
    assert rows({"machine": {"cores": 2}}) == []


def test_the_peers_stand_beside_ours_in_the_same_row() -> None:
    row = rows({"ours": stage(-9.0), "pull": stage(65.0), "push": stage(60.0)})[0]
    assert (row.ours, row.peer, row.met) == ("-9 ms", "pull 65 / push 60 ms", True)


def test_a_gap_under_load_is_told_in_steps_of_the_decode_worker_too() -> None:
    assert rows({"ours": stage(-9.0)})[1].ours == "40 ms (2.0 of D's steps)"


def test_a_peer_that_was_not_measured_is_left_out() -> None:
    assert rows({"ours": stage(-9.0)})[0].peer == "-"


@pytest.mark.parametrize(("exposed_ms", "met"), [(10.0, True), (10.1, False)])
def test_a_target_is_met_up_to_and_with_its_value(exposed_ms: float, met: bool) -> None:
    assert rows({"ours": stage(exposed_ms)})[0].met is met


def test_one_byte_of_a_warm_prompt_misses_the_target() -> None:
    wire = {"left_share": 0.004, "warm_share": 1e-6}
    left, warm = rows({"stores": {"wire": wire}})
    assert (left.met, warm.met) == (True, False)


def test_nixl_is_held_against_nixl_alone_and_left_out_where_it_is_not() -> None:
    speeds = {"64 MB": {"tcp, one stream": 2.6, "nixl": 4.5, "NIXL alone": 5.0}}
    tcp, over_nixl = rows({"transports": speeds})
    assert (tcp.met, over_nixl.ours, over_nixl.met) == (True, "0.90", True)
    del speeds["64 MB"]["NIXL alone"]
    assert len(rows({"transports": speeds})) == 1


def test_mooncake_stands_beside_ours_and_says_why_it_was_left_out() -> None:
    speeds = {"64 MB": {"tcp, one stream": 2.6, "sockets and checksums alone": 3.0}, "mooncake": {"64 MB": 1.3}}
    arena = {"copy_ms": 10.0, "put_ms": 12.5, "get_ms": 12.5, "exists_ms": 0.1, "exists_remote_ms": 0.4}
    peer = {"put_ms": 20.0, "get_ms": 25.0, "exists_ms": 0.5}
    found = {"transports": speeds, "arena": {**arena, "mooncake": peer}}
    assert [row.peer for row in rows(found)] == [
        "Mooncake 0.50",
        "Mooncake 0.40",
        "Mooncake 0.500 ms",
        "Mooncake 0.500 ms",
        "sockets and checksums alone 3 GB/s, Mooncake 1.3 GB/s",
    ]
    left_out = {"left_out": "it needs libibverbs1 of Debian"}
    assert rows({"arena": {**arena, "mooncake": left_out}})[0].peer == "no Mooncake: it needs libibverbs1 of Debian"


def test_a_link_that_could_not_be_shaped_gives_no_row() -> None:
    assert rows({"link": {"skipped": "needs root"}}) == []
    measured = {"exposed_share": 0.2, "codecs": {"auto": {"exposed_share": 0.2}, "raw": {"exposed_share": 0.01}}}
    assert [row.met for row in rows({"link": measured})] == [False]


def test_a_question_that_was_not_timed_has_missed_its_target() -> None:
    arena = {"copy_ms": 6.0, "put_ms": 10.0, "get_ms": 11.0, "exists_ms": 0.2}
    assert [(row.ours, row.met) for row in rows({"arena": arena})] == [
        ("0.60", True), ("0.55", False), ("0.200 ms", True), ("not measured", False)
    ]  # fmt: skip
    assert [row.met for row in rows({"arena": {**arena, "exists_remote_ms": 0.4}})][3]


def test_what_missed_its_target_says_so() -> None:
    lines = render(rows({"ours": stage(11.0)})).splitlines()
    assert "MISSED" in lines[2]
    assert "MISSED" not in lines[3]
