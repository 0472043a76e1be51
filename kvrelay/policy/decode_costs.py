"""What it costs to have a worker write an answer. It must never count what it costs to compute the prompt there.

One formula, for one worker in plain numbers and for many in arrays: numpy takes a microsecond a step, which is much for
a few workers and little for many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

import numpy as np

from kvrelay.policy.cost import LATE_SHARE, DecodeColumns, Prompt
from kvrelay.policy.fit import Floats
from kvrelay.policy.laws import MANY
from kvrelay.policy.perf import Number, prefill_seconds, step_seconds

MIN_FREE_SHARE = 0.01
"""Free KV share below which the price of a block stops rising: an overfull worker stays comparable."""


class Load(NamedTuple, Generic[Number]):
    """What decides what one more answer costs: of a worker, or of each of many."""

    step_rates: Sequence[Number]
    prefill_rates: Sequence[Number]
    sequences: Number
    kv_tokens: Number
    capacity_tokens: Number


class DecodeCost(NamedTuple, Generic[Number]):
    """Seconds that one more answer costs a worker and the requests that run there."""

    wait_s: Number
    """Wait for KV blocks."""
    harm_s: Number
    pressure_s: Number
    step_s: Number
    """Predicted TPOT."""


def decode_cost(prompt: Prompt, decodes: DecodeColumns, at: int) -> DecodeCost[float]:
    """The answer joins the running requests of the worker at this position."""
    return _decode_cost(prompt, _load(decodes, at), decodes.remaining_tokens, max, min)


class DecodeCosts:
    """What one more answer costs on each worker, by position; each is worked out once."""

    def __init__(self, prompt: Prompt, decodes: DecodeColumns) -> None:
        self._prompt = prompt
        self._decodes = decodes
        self._known: dict[int, DecodeCost[float]] = {}
        self.seconds = self._of_few() if len(decodes.answer_s) < MANY else self._of_many()
        """What it costs on each worker, all in all, from the KV in place to the last token."""

    def __repr__(self) -> str:
        return f"<DecodeCosts of {len(self.seconds)} workers>"

    def __getitem__(self, at: int, /) -> DecodeCost[float]:
        known = self._known.get(at)
        if known is None:
            known = self._known[at] = decode_cost(self._prompt, self._decodes, at)
        return known

    def _of_few(self) -> list[float]:
        return [_sum(self[at], answer_s) for at, answer_s in enumerate(self._decodes.answer_s)]

    def _of_many(self) -> list[float]:
        cost = _decode_cost(self._prompt, _loads(self._decodes), self._decodes.remaining_tokens, np.maximum, np.minimum)
        seconds: list[float] = _sum(cost, np.array(self._decodes.answer_s)).tolist()
        return seconds


def _sum(cost: DecodeCost[Number], answer_s: Number) -> Number:
    return cost.wait_s + answer_s + cost.harm_s + cost.pressure_s


def _load(decodes: DecodeColumns, at: int) -> Load[float]:
    return Load(
        decodes.step_rates[at],
        decodes.as_prefills.rates[at],
        decodes.sequences[at],
        decodes.kv_tokens[at],
        decodes.kv_capacity_tokens[at],
    )


def _loads(decodes: DecodeColumns) -> Load[Floats]:
    return Load(
        decodes.step_rates.columns,
        decodes.as_prefills.rates.columns,
        np.array(decodes.sequences, float),
        np.array(decodes.kv_tokens, float),
        np.array(decodes.kv_capacity_tokens, float),
    )


def _decode_cost(
    prompt: Prompt,
    load: Load[Number],
    remaining_tokens: float,
    most: Callable[[float, Number], Number],
    least: Callable[[float, Number], Number],
) -> DecodeCost[Number]:
    need, sequences, kv_tokens, capacity = prompt.held_tokens, load.sequences, load.kv_tokens, load.capacity_tokens
    before_s = step_seconds(load.step_rates, sequences, kv_tokens)
    after_s = step_seconds(load.step_rates, sequences + prompt.sequences, kv_tokens + need)
    share = least(1.0, most(0.0, kv_tokens + need - capacity) / most(1.0, kv_tokens))
    again_s = prefill_seconds(load.prefill_rates, prompt.tokens, 0.0)
    return DecodeCost(
        # Its requests free their blocks one after the other, over the time that they still run.
        wait_s=share * remaining_tokens * before_s,
        harm_s=LATE_SHARE * (after_s - before_s) * sequences * prompt.output_tokens,
        # At the brim somebody is preempted, and a prompt like this one is computed again.
        pressure_s=kv_pressure(kv_tokens + need, capacity, most) * again_s,
        step_s=after_s,
    )


def kv_pressure(kv_tokens: Number, capacity_tokens: Number, most: Callable[[float, Number], Number]) -> Number:
    """Rising price of a worker's last free KV: 0.01 at half full, 0.09 at nine tenths, 1 at the brim, then linear."""
    share = kv_tokens / most(1.0, capacity_tokens)
    return MIN_FREE_SHARE * share / most(MIN_FREE_SHARE, 1.0 - share)
