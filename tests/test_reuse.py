"""The index foretells, token by token, what an LRU cache finds again of public traces.

The numbers are those of the PyPI package kvcache-simulator 0.1.3 (LRU on a trie of 512-token blocks, second half of the
requests). ``KVRELAY_TRACES`` names the folder of the traces (Mooncake FAST'25), which are not part of this repository.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from benchmarks.replay.lru import UNLIMITED, foretell
from benchmarks.replay.trace import TracedRequest, read_trace

TRACES = Path(os.environ.get("KVRELAY_TRACES", "/nowhere"))
CONVERSATION, SYNTHETIC = "mooncake_conversation_trace.jsonl", "mooncake_synthetic_trace.jsonl"

EXPECTED = [
    (CONVERSATION, 1_000, 3_173_822, 67_915_607),
    (CONVERSATION, 5_859, 9_286_131, 67_915_607),
    (CONVERSATION, 10_000, 14_910_149, 67_915_607),
    (CONVERSATION, 19_531, 20_351_052, 67_915_607),
    (CONVERSATION, 50_000, 25_582_964, 67_915_607),
    (CONVERSATION, UNLIMITED, 27_038_068, 67_915_607),
    (SYNTHETIC, 1_000, 4_755_642, 36_552_394),
    (SYNTHETIC, 5_859, 16_553_342, 36_552_394),
    (SYNTHETIC, 10_000, 22_061_940, 36_552_394),
    (SYNTHETIC, 19_531, 28_127_092, 36_552_394),
    (SYNTHETIC, UNLIMITED, 31_535_563, 36_552_394),
]


@functools.cache
def trace(name: str) -> list[TracedRequest]:
    return read_trace(TRACES / name)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="set KVRELAY_TRACES to the folder of public traces")
@pytest.mark.parametrize(("name", "blocks", "hits", "total"), EXPECTED)
def test_reuse_of_a_public_trace_is_foretold_to_the_token(name: str, blocks: int, hits: int, total: int) -> None:
    assert foretell(trace(name), blocks) == (hits, total)


def test_a_small_trace_is_counted_by_hand() -> None:
    requests = [
        TracedRequest(1000, [1, 2]),
        TracedRequest(1000, [1, 3]),  # 2 is the least recently used
        TracedRequest(1024, [1, 2]),  # 512 hit; 3 goes
        TracedRequest(600, [1, 2]),  # all hit
    ]
    assert foretell(requests, blocks=2) == (512 + 600, 1624)
