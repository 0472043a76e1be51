"""What it costs workers at least to compute a prompt, told without a look at each one's offers. It must never be more
than what ``cost.prefill_cost`` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvrelay.policy.cost import Coming, PrefillColumns, Prompt
from kvrelay.policy.laws import MANY
from kvrelay.policy.perf import Number, prefill_seconds


def least_prefill_s(prompt: Prompt, prefills: PrefillColumns, price: Sequence[float]) -> list[float]:
    """Wait beyond the queue and priced prefill of each worker; ``price``: of a second of prefill there."""
    return (_of_few if len(prefills.names) < MANY else _of_many)(prompt, prefills, price)


def _of_few(prompt: Prompt, prefills: PrefillColumns, price: Sequence[float]) -> list[float]:
    asked, (at_hand, stored, coming) = prompt.tokens, prefills.hints
    found = [
        _cost_s(asked, rates, each, tokens, max)
        for rates, each, tokens in zip(prefills.rates, price, at_hand, strict=True)
    ]
    for prefix in coming:
        for at in prefix.to:
            wait_s = max(0.0, _there_s(prefix, stored[at], max) - prefills.queue_s[at])
            found[at] = min(found[at], wait_s + _cost_s(asked, prefills.rates[at], price[at], prefix.tokens, max))
    return found


def _of_many(prompt: Prompt, prefills: PrefillColumns, price: Sequence[float]) -> list[float]:
    asked, (at_hand, stored, coming) = prompt.tokens, prefills.hints
    rates, prices = prefills.rates.columns, np.array(price, float)
    found = _cost_s(asked, rates, prices, np.array(at_hand, float), np.maximum)
    queue_s, there = np.array(prefills.queue_s, float), np.array(stored, float)
    for prefix in coming:
        to = slice(None) if len(prefix.to) == len(found) else np.array(prefix.to, np.int64)
        wait_s = np.maximum(0.0, _there_s(prefix, there[to], np.maximum) - queue_s[to])
        cost_s = wait_s + _cost_s(asked, tuple(rate[to] for rate in rates), prices[to], prefix.tokens, np.maximum)
        found[to] = np.minimum(found[to], cost_s)
    least_s: list[float] = found.tolist()
    return least_s


def _there_s(prefix: Coming, stored: Number, most: Callable[[float, Number], Number]) -> Number:
    return prefix.first_s + prefix.page_s * most(0.0, prefix.pages - 1 - stored)


def _cost_s(
    asked: int,
    rates: Sequence[Number],
    price: Number,
    cached: Number | float,
    most: Callable[[float, Number | float], Number | float],
) -> Number:
    new = most(1.0, asked - cached)
    return price * prefill_seconds(rates, new, asked - new)
