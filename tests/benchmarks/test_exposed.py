"""Tests of benchmarks/exposed.py: what counts as the hand-off."""

from __future__ import annotations

import pytest

from benchmarks import exposed
from benchmarks.quantiles import ms
from tests.benchmarks.fake_split import FLOOR_S, GAP_S, FakeSplit


async def test_the_time_of_a_one_token_prompt_is_not_the_hand_offs() -> None:
    figures = await exposed.measure(FakeSplit(), [64], 3, lambda line: None)
    assert figures["64"]["floor_ms"] == pytest.approx(ms(FLOOR_S))
    assert figures["64"]["exposed_ms"] == pytest.approx(ms(GAP_S - FLOOR_S))
    assert figures["64"]["n"] == 3


async def test_no_prompt_is_asked_twice() -> None:
    split = FakeSplit()
    await exposed.measure(split, [64, 256], 3, lambda line: None)
    assert len({tuple(prompt[:32]) for prompt in split.prompts}) == len(split.prompts)
