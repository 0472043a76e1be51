"""A law ``seconds = rates . amounts`` that learns from what really happened. It must never let one stall, or one
starved input, bend it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.types import Value

Floats = NDArray[np.float64]

FORGETTING = 0.98
"""Weight of an observation after the next one: fifty of them count, so a change is learned in about as many."""
PRIOR_WEIGHT = 0.01
"""The seed counts as a hundredth of an observation, for ever: it fills the directions that nothing was seen in."""
KEPT = 64
"""Errors kept, to state one's own and to tell what is an outlier."""
CLIP_AFTER = 8
CLIP_QUANTILE = 0.75
"""A quarter of the observations may be outliers. More than that are news, and the limit grows to let them in."""
CLIP_TIMES = 2.0
MIN_CLIP = 0.05
NEWS = 8
"""So many errors in a row, all beyond the limit and on one side, are no outliers: the machine has changed."""
MIN_SHARE = 0.01
"""A rate that was learned to be nothing stays possible: a hundredth of what its seed says, when a law starts anew."""
UNKNOWN_ERROR = 1.0
"""What a law that has seen nothing says of itself: it may be off by as much as it predicts."""
MIN_RATE = 1e-18
MAX_RATE = 1e6
"""In seconds: ten days for a start, or for a token."""
_MAX_SUM = 1e40
"""Far above what fifty observations of any work add up to, and far below what overflows when it is solved."""
_MAX_LOGARITHM = 100.0


class Fit(Value, frozen=True, kw_only=True):
    """Least squares of the *relative* error, with forgetting, around a seed. All rates are >= 0.

    Relative, because a law of prefills has to be right for ten tokens and for a hundred thousand; it also gives a stall
    of ten times the usual time no more weight than any other observation. What the seed gets wrong by a factor (an
    unknown machine) is learned first, from the median of a few observations; its shape is doubted only afterwards.
    """

    seed: tuple[float, ...]
    """Rates before anything was seen, in seconds per unit of each amount."""
    rates: tuple[float, ...]
    """Rates now."""
    normal: tuple[tuple[float, ...], ...]
    """Decayed sums of ``a aT / s**2`` for amounts ``a`` that took ``s`` seconds."""
    pull: tuple[float, ...]
    """Decayed sums of ``a / s``."""
    ratios: tuple[float, ...] = ()
    """Logarithms of seen over seeded seconds, the last ones."""
    errors: tuple[float, ...] = ()
    """Logarithms of seen over predicted seconds, predicted before they were learned; the last ones."""
    seen: int = 0

    def seconds(self, *amounts: float) -> float:
        """What the law predicts for one set of amounts."""
        return _dot(self.rates, amounts)

    def error(self, quantile: float = 0.5) -> float:
        """Quantile of ``|predicted - seen| / seen`` over the last observations."""
        if not self.errors:
            return UNKNOWN_ERROR
        return quantile_of([abs(math.expm1(-error)) for error in self.errors], quantile)

    def chance(self) -> float:
        """How far errors are from each other by chance, as a logarithm: the median, between each and the one after it.
        So a worker that has changed has not become uncertain."""
        if len(self.errors) < 2:
            return math.inf
        return quantile_of([abs(after - before) for before, after in pairwise(self.errors)], 0.5) / math.sqrt(2.0)

    def news(self, count: int) -> float:
        """The smallest of the last ``count`` errors, as a logarithm, where all of them lie on one side beyond the limit
        that held before them; otherwise 0."""
        last, limit = self.errors[-count:], _limit(self.errors[:-count])
        if len(last) < count or not (min(last) > limit or max(last) < -limit):
            return 0.0
        return min(last, key=abs)

    def like(self, other: Fit, factor: float) -> Fit:
        """What ``other`` says, ``factor`` times as slow, of which was seen what was seen here."""
        return msgspec.structs.replace(self, rates=tuple(factor * rate for rate in other.rates))

    def observe(self, amounts: Sequence[float], seconds: float) -> Fit:
        """The law after ``amounts`` took ``seconds``. What cannot be a measurement changes nothing."""
        predicted, seeded = _dot(self.rates, amounts), _dot(self.seed, amounts)
        if not (0.0 < seconds < math.inf and 0.0 < seeded < math.inf and predicted > 0.0):
            return self
        error, limit = math.log(seconds / predicted), _limit(self.errors)
        believed_s = predicted * math.exp(max(-limit, min(limit, error)))
        learned = self._learn(amounts, believed_s, seconds / seeded, error)
        return learned._renewed() if learned.news(NEWS) else learned

    def _learn(self, amounts: Sequence[float], seconds: float, ratio: float, error: float) -> Fit:
        shares = [amount / seconds for amount in amounts]
        normal = tuple(
            tuple(FORGETTING * known + one * other for known, other in zip(row, shares, strict=True))
            for row, one in zip(self.normal, shares, strict=True)
        )
        pull = tuple(FORGETTING * known + share for known, share in zip(self.pull, shares, strict=True))
        ratios = (*self.ratios, math.log(ratio))[-KEPT:]
        scale = math.exp(quantile_of(ratios, 0.5))
        rates = _solve([scale * rate for rate in self.seed], self.rates, normal, pull)
        return Fit(
            seed=self.seed,
            rates=rates,
            normal=normal,
            pull=pull,
            ratios=ratios,
            errors=(*self.errors, error)[-KEPT:],
            seen=self.seen + 1,
        )

    def can_be_learned(self, amounts: int) -> bool:
        """Whether a law of so many ``amounts`` can have come to be this one: one from a file may be anything."""
        lengths = {len(self.seed), len(self.rates), len(self.pull), len(self.normal), *map(len, self.normal)}
        logarithms = (*self.ratios, *self.errors)
        return (
            lengths == {amounts}
            and all(MIN_RATE <= rate <= MAX_RATE for rate in (*self.seed, *self.rates))
            and all(0.0 <= value <= _MAX_SUM for value in self.pull)
            and _is_sum_of_squares(self.normal)
            and all(abs(value) <= _MAX_LOGARITHM for value in logarithms)
            and max(len(self.ratios), len(self.errors)) <= KEPT
            and self.seen >= 0
        )

    def _renewed(self) -> Fit:
        """The same shape, scaled to the last errors; what was learned before the change is let go."""
        factor = math.exp(quantile_of(self.errors[-NEWS:], 0.5))
        return msgspec.structs.replace(self.heir(factor), errors=self.errors[-NEWS:], seen=self.seen)

    def heir(self, factor: float = 1.0) -> Fit:
        """A law that believes this one, ``factor`` times as slow, and has seen nothing itself."""
        scale = math.exp(quantile_of(self.ratios, 0.5)) if self.ratios else 1.0
        possible = [MIN_SHARE * scale * rate for rate in self.seed]
        return start(*(factor * max(pair) for pair in zip(self.rates, possible, strict=True)))


def start(*seed: float) -> Fit:
    """A law that has seen nothing and believes ``seed``."""
    rates = tuple(max(MIN_RATE, rate) for rate in seed)
    zeros = (0.0,) * len(rates)
    return Fit(seed=rates, rates=rates, normal=(zeros,) * len(rates), pull=zeros)


def _limit(errors: Sequence[float]) -> float:
    """Largest error, as a logarithm, that is believed as it is after these."""
    if len(errors) < CLIP_AFTER:
        return math.inf
    return max(MIN_CLIP, CLIP_TIMES * quantile_of([abs(error) for error in errors], CLIP_QUANTILE))


def quantile_of(values: Sequence[float], quantile: float) -> float:
    """The ``quantile`` of a few values. For dozens of values numpy's own takes longer than all else that is learned
    from one request."""
    ordered = sorted(values)
    place = quantile * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _is_sum_of_squares(matrix: Sequence[Sequence[float]]) -> bool:
    """Whether ``matrix`` can be solved: a sum of ``a aT`` for amounts ``a``, up to rounding."""
    found = np.array(matrix, dtype=np.float64)
    if not np.all((found >= 0.0) & (found <= _MAX_SUM)) or not np.allclose(found, found.T, rtol=1e-6, atol=0.0):
        return False
    scale = np.sqrt(np.diag(found))
    scale[scale == 0.0] = 1.0
    return bool(np.linalg.eigvalsh(found / np.outer(scale, scale)).min() >= -1e-6)


def _dot(rates: Sequence[float], amounts: Sequence[float]) -> float:
    if len(rates) == len(amounts) == 3:  # as most laws have, and a choice asks hundreds of them
        return rates[0] * amounts[0] + rates[1] * amounts[1] + rates[2] * amounts[2]
    return sum(rate * amount for rate, amount in zip(rates, amounts, strict=True))


def _solve(
    believed: Sequence[float], now: Sequence[float], normal: Sequence[Sequence[float]], pull: Sequence[float]
) -> tuple[float, ...]:
    """Rates that fit best around ``believed``; those that would be negative are zero.

    Solved in units of ``now``, so that the prior weighs the same on a rate that its seed made far too small. Without
    numpy, which needs ten times as long for three rates.
    """
    unit = [max(rate, MIN_SHARE * seed) for rate, seed in zip(now, believed, strict=True)]
    places = range(len(unit))
    matrix = [[normal[row][column] * unit[row] * unit[column] for column in places] for row in places]
    target = [pull[row] * unit[row] + PRIOR_WEIGHT * min(believed[row] / unit[row], 1.0 / MIN_SHARE) for row in places]
    for row in places:
        matrix[row][row] += PRIOR_WEIGHT
    used, factors = list(places), [0.0] * len(unit)
    while used:
        found = _linear([[matrix[row][column] for column in used] for row in used], [target[row] for row in used])
        factors = [0.0] * len(unit)
        for place, factor in zip(used, found, strict=True):
            factors[place] = factor
        if min(found) >= 0.0:
            break
        used = [place for place in used if factors[place] > 0.0]
    return tuple(max(MIN_RATE, factor * rate) for factor, rate in zip(factors, unit, strict=True))


def _linear(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solution of a few equations whose ``matrix`` is symmetric and positive: none needs to change its place."""
    size = len(target)
    for step in range(size):
        for row in range(step + 1, size):
            factor = matrix[row][step] / matrix[step][step]
            target[row] -= factor * target[step]
            for column in range(step, size):
                matrix[row][column] -= factor * matrix[step][column]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(matrix[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (target[row] - rest) / matrix[row][row]
    return found
