"""Tests of benchmarks/load.py: what of the mixed load is counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import load
from benchmarks.answers import Answer
from benchmarks.load import LONG_TOKENS, STREAM_TOKENS, Window
from benchmarks.split import Handed
from tests.benchmarks.fake_split import FakeSplit


def handed(*token_s: float, sent_s: float = 0.0, gap_s: float | None = 0.05) -> Handed:
    answer = Answer(request_id="r", sent_s=sent_s, token_s=token_s)
    return Handed(answer=answer, prefill_s=None, gap_s=gap_s)


async def test_streams_ask_again_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    split = FakeSplit()
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: 0.01 * len(split.prompts)))
    monkeypatch.setattr(load, "STREAMS", 1)  # the others begin some seconds later
    monkeypatch.setattr(load, "LONG_EVERY_S", 0.0)
    await load.measure(split, 0.5, lambda line: None, warm_up_s=0.0)
    assert 50 <= len(split.prompts) <= 52
    assert {len(prompt) for prompt in split.prompts} == {STREAM_TOKENS[0], LONG_TOKENS[0]}


def test_gaps_are_those_of_all_requests_and_latencies_between_tokens_of_the_streams_alone() -> None:
    window = Window(0.0, 2.0, streams=[handed(0.1, 0.2, 0.3)], longs=[handed(0.2, 0.4), handed(1.0, gap_s=None)])
    figures = window.figures()
    assert (figures["requests"], figures["gap"]["n"], figures["stream_itl"]["n"]) == (3, 2, 2)
    assert figures["tokens_per_s"] == 3.0


def test_what_was_not_split_has_no_gaps() -> None:
    figures = Window(0.0, 2.0, streams=[handed(0.1, gap_s=None)], longs=[handed(0.2, gap_s=None)]).figures()
    assert "gap" not in figures
    assert figures["requests"] == 2


def test_requests_count_by_when_they_were_sent_and_tokens_by_when_they_came() -> None:
    early, late = handed(0.9, 1.1, sent_s=0.5), handed(1.8, 2.5, sent_s=1.5)
    figures = Window(1.0, 2.0, streams=[early, late]).figures()
    assert (figures["requests"], figures["stream_ttft"]["max_ms"]) == (1, 300.0)
    assert (figures["stream_itl"]["n"], figures["stream_itl"]["max_ms"]) == (1, 200.0)
    assert figures["tokens_per_s"] == 2.0
