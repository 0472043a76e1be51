"""Prompts of random tokens: no two share a page, so that nothing is cached unless a benchmark asks twice."""

from __future__ import annotations

import random

_FIRST_ID, _LAST_ID = 1000, 40000
"""Ordinary tokens of SmolLM2: none of them is special."""


class Prompts:
    """A stream of prompts; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __repr__(self) -> str:
        return "<Prompts>"

    def of(self, tokens: int) -> list[int]:
        """Token ids of a prompt of ``tokens`` tokens."""
        return [self._random.randrange(_FIRST_ID, _LAST_ID) for _ in range(tokens)]

    def gap_s(self, mean_s: float) -> float:
        """A wait around ``mean_s``: arrivals that tick like a clock would meet the same steps again and again."""
        return self._random.uniform(0.85 * mean_s, 1.15 * mean_s)
