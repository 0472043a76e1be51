"""What it costs to have a worker write an answer. It must never count what it costs to compute the prompt there.

One formula, for one worker in plain numbers and for many in arrays: numpy takes a microsecond a step, which is much for
a few workers and little for many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

import numpy as np

from kvrelay.policy.cost import LATE_SHARE, Prompt, Writers
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


class Writing(NamedTuple, Generic[Number]):
    """Seconds."""

    wait_s: Number
    """For KV blocks."""
    harm_s: Number
    pressure_s: Number
    step_s: Number
    """Predicted TPOT."""


def write(prompt: Prompt, writers: Writers, at: int) -> Writing[float]:
    """The answer joins the running requests of the worker at this position."""
    return _write(prompt, _load(writers, at), writers.remaining_tokens, max, min)


class Writings:
    """Those of all workers, by position; each is worked out once."""

    def __init__(self, prompt: Prompt, writers: Writers) -> None:
        self._prompt = prompt
        self._writers = writers
        self._known: dict[int, Writing[float]] = {}
        self.seconds = self._of_few() if len(writers.answer_s) < MANY else self._of_many()
        """What it costs on each worker, all in all, from the KV in place to the last token."""

    def __repr__(self) -> str:
        return f"<Writings of {len(self.seconds)} workers>"

    def __getitem__(self, at: int, /) -> Writing[float]:
        known = self._known.get(at)
        if known is None:
            known = self._known[at] = write(self._prompt, self._writers, at)
        return known

    def _of_few(self) -> list[float]:
        return [_sum(self[at], answer_s) for at, answer_s in enumerate(self._writers.answer_s)]

    def _of_many(self) -> list[float]:
        writing = _write(self._prompt, _loads(self._writers), self._writers.remaining_tokens, np.maximum, np.minimum)
        seconds: list[float] = _sum(writing, np.array(self._writers.answer_s)).tolist()
        return seconds


def _sum(writing: Writing[Number], answer_s: Number) -> Number:
    return writing.wait_s + answer_s + writing.harm_s + writing.pressure_s


def _load(writers: Writers, at: int) -> Load[float]:
    return Load(
        writers.step_rates[at],
        writers.readers.rates[at],
        writers.sequences[at],
        writers.kv_tokens[at],
        writers.kv_capacity_tokens[at],
    )


def _loads(writers: Writers) -> Load[Floats]:
    return Load(
        writers.step_rates.columns,
        writers.readers.rates.columns,
        np.array(writers.sequences, float),
        np.array(writers.kv_tokens, float),
        np.array(writers.kv_capacity_tokens, float),
    )


def _write(
    prompt: Prompt,
    load: Load[Number],
    remaining_tokens: float,
    most: Callable[[float, Number], Number],
    least: Callable[[float, Number], Number],
) -> Writing[Number]:
    need, sequences, kv_tokens, capacity = prompt.held_tokens, load.sequences, load.kv_tokens, load.capacity_tokens
    before_s = step_seconds(load.step_rates, sequences, kv_tokens)
    after_s = step_seconds(load.step_rates, sequences + prompt.sequences, kv_tokens + need)
    share = least(1.0, most(0.0, kv_tokens + need - capacity) / most(1.0, kv_tokens))
    again_s = prefill_seconds(load.prefill_rates, prompt.tokens, 0.0)
    return Writing(
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
