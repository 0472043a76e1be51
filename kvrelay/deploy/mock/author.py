"""What a mock engine answers: each token follows from all tokens before it, and from nothing else.

So a test knows the right answer to a prompt whatever path it took, and an answer that was continued elsewhere, from the
prompt and the tokens written so far, goes on as it would have. It must never depend on who computes it, or when.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER = 6364136223846793005
"""Knuth's, of MMIX: any odd number that mixes would do."""
_MASK = (1 << 64) - 1
_GROWTH = 1 << 14
_CHOICE = 0x9E3779B97F4A7C15
"""Sets the answers of several choices apart; the first one is untouched by it."""


class Powers:
    """Powers of the multiplier, the highest first, as many as the longest prompt needed so far."""

    def __init__(self) -> None:
        self._powers = np.ones(1, dtype=np.uint64)

    def __repr__(self) -> str:
        return f"<Powers up to {len(self._powers) - 1}>"

    def last(self, count: int) -> NDArray[np.uint64]:
        """The powers ``count - 1`` down to 0."""
        if count > len(self._powers):
            factors = np.full(_GROWTH * (1 + count // _GROWTH), _MULTIPLIER, dtype=np.uint64)
            factors[0] = 1
            self._powers = np.multiply.accumulate(factors)[::-1].copy()
        return self._powers[len(self._powers) - count :]


_POWERS = Powers()


def state_of(tokens: Sequence[int]) -> int:
    """Digest of ``tokens``, 64 bits; ``advance`` goes on from it."""
    values = np.frombuffer(array("I", tokens), dtype=np.uint32).astype(np.uint64)
    values += np.uint64(1)  # else leading zeros would not count
    return int(np.dot(values, _POWERS.last(len(values))))


def advance(state: int, token: int) -> int:
    """``state`` after one more token."""
    return (state * _MULTIPLIER + token + 1) & _MASK


def _mixed(state: int) -> int:
    """All bits of the result depend on all bits of ``state`` (the finaliser of SplitMix64)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Author:
    """Chooses tokens among ``words``; every ``mean_tokens``-th answer, on average, ends at any one token."""

    def __init__(self, words: Sequence[int], end: int, mean_tokens: int) -> None:
        self._words = tuple(words)
        self._end = end
        self._mean_tokens = mean_tokens

    def __repr__(self) -> str:
        return f"<Author of {len(self._words)} words, answers of {self._mean_tokens} tokens>"

    def next(self, state: int, *, may_end: bool, choice: int = 0) -> int:
        """The token after ``state``; the end of the answer only where it ``may_end``."""
        drawn = _mixed(state ^ (choice * _CHOICE & _MASK))
        if may_end and (drawn >> 32) % self._mean_tokens == 0:
            return self._end
        return self._words[drawn % len(self._words)]

    def is_end(self, token: int) -> bool:
        return token == self._end

    def answer(self, prompt: Sequence[int], count: int, *, choice: int = 0) -> list[int]:
        """The first ``count`` tokens of the answer to ``prompt``, its end ignored."""
        return list(itertools.islice(self._tokens(prompt, choice), count))

    def _tokens(self, prompt: Sequence[int], choice: int) -> Iterator[int]:
        state = state_of(prompt)
        while True:
            token = self.next(state, may_end=False, choice=choice)
            yield token
            state = advance(state, token)
