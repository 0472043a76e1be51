"""Tests of benchmarks/mixed.py: ours beside the peers, and that no miss is hidden."""

from __future__ import annotations

from typing import Any

from benchmarks.mixed import rows


def stage(ttft_ms: float, itl_ms: float, tokens_per_s: float) -> dict[str, Any]:
    return {
        "stream_ttft": {"p50_ms": ttft_ms},
        "stream_itl": {"p999_ms": itl_ms},
        "tokens_per_s": tokens_per_s,
    }


def test_throughput_is_held_against_the_better_peer() -> None:
    found = {"colocated": stage(170, 3000, 100.0), "nixl": stage(3000, 90, 80.0)}
    assert [row.met for row in rows({"kvrelay": stage(250, 150, 95.0), **found})] == [True, True, True]
    table = rows({"kvrelay": stage(251, 151, 94.9), **found})
    assert [row.met for row in table] == [False, False, False]
    assert table[0].peer == "colocated 0.17, nixl 3.00 s"


def test_without_ours_or_without_peers_nothing_is_compared() -> None:
    assert rows({"machine": {}, "nixl": stage(3000, 90, 80.0)}) == []
    assert [row.what for row in rows({"kvrelay": stage(250, 150, 95.0)})][-1] == "short prompts' ITL p99.9"
