"""Compares what two engines think of a next token where their numbers are not the same to the last bit."""

from __future__ import annotations

ROUNDING = 0.6
"""0.23 at most was seen of bfloat16 against float32; wrong KV is off by several."""
SHARED = 10
"""Of the twenty likeliest tokens of each."""


def assert_close(mine: dict[str, float], theirs: dict[str, float]) -> None:
    """Log probabilities by token differ by no more than rounding."""
    shared = mine.keys() & theirs.keys()
    assert len(shared) >= SHARED
    assert max(abs(mine[token] - theirs[token]) for token in shared) < ROUNDING, "rounding, not garbage"
