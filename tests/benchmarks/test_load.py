"""Tests of benchmarks/load.py: what of the mixed load is counted."""

from __future__ import annotations

from benchmarks import load
from benchmarks.load import LONG_TOKENS, STREAM_TOKENS, Tally
from tests.benchmarks.fake_split import FakeSplit


async def test_streams_ask_again_until_the_time_is_over() -> None:
    split = FakeSplit()
    figures = await load.measure(split, 0.05, lambda line: None)
    assert figures["stream_ttft"]["n"] > 1
    assert {len(prompt) for prompt in split.prompts} == {STREAM_TOKENS[0], LONG_TOKENS[0]}


async def test_gaps_are_those_of_all_requests_and_latencies_between_tokens_of_the_streams_alone() -> None:
    split = FakeSplit()
    tally = Tally(streams=[await split.ask([1], 3)], longs=[await split.ask([1], 5)])
    figures = tally.figures(duration_s=2.0)
    assert figures["gap"]["n"] == 2
    assert figures["stream_itl"]["n"] == 2
    assert figures["tokens_per_s"] == 4.0
