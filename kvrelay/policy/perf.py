"""How long things take: prefill, decode step, moving bytes. It learns from what happened and states its own error.

Values only: every ``saw_*`` returns a new one, and msgspec writes and reads them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvrelay.policy.fit import Fit, Floats, start
from kvrelay.policy.hardware import BANDWIDTH_SHARE, FLOPS_SHARE, STEP_S, Hardware, ModelShape
from kvrelay.types import Value

ANSWER_S = 0.010
"""Seed of what lies between a filled KV cache and a token at the router: HTTP, scheduling, sampling."""


def prefill_amounts(new_tokens: float, past_tokens: float) -> tuple[float, float, float]:
    """What a prefill is paid for: a start, each new token, each pair of a new token and one before it."""
    return 1.0, new_tokens, new_tokens * (past_tokens + new_tokens / 2)


Number = TypeVar("Number", float, Floats)
"""A number of one worker, or an array of one for each of many: the laws are the same."""
Rates = tuple[float, ...]
"""Seconds for each of the amounts of a law."""


def prefill_seconds(rates: Sequence[Number], new_tokens: Number | float, past_tokens: Number | float) -> Number:
    """What ``rates`` make of ``prefill_amounts``, as fast as can be: a choice asks hundreds of times."""
    return rates[0] + rates[1] * new_tokens + rates[2] * (new_tokens * (past_tokens + new_tokens / 2))


def step_seconds(rates: Sequence[Number], sequences: Number, kv_tokens: Number) -> Number:
    """Seconds of a decode step."""
    return rates[0] + rates[1] * sequences + rates[2] * kv_tokens


class Perf(Value, frozen=True, kw_only=True):
    """The laws of one worker, or of one kind of worker."""

    prefill: Fit
    """Seconds of a prefill, against ``prefill_amounts``."""
    step: Fit
    """Seconds of one decode step, against 1, its sequences, and the KV tokens that it reads."""
    answer: Fit
    """Seconds from KV in place to the first token at the router, against 1."""

    def prefill_s(self, new_tokens: float, past_tokens: float = 0.0) -> float:
        return self.prefill.seconds(*prefill_amounts(new_tokens, past_tokens))

    def step_s(self, sequences: float, kv_tokens: float) -> float:
        return self.step.seconds(1.0, sequences, kv_tokens)

    def saw_prefill(self, new_tokens: float, past_tokens: float, seconds: float) -> Perf:
        fit = self.prefill.observe(prefill_amounts(new_tokens, past_tokens), seconds)
        return msgspec.structs.replace(self, prefill=fit)

    def saw_step(self, sequences: float, kv_tokens: float, seconds: float) -> Perf:
        return msgspec.structs.replace(self, step=self.step.observe((1.0, sequences, kv_tokens), seconds))

    def saw_answer(self, seconds: float) -> Perf:
        return msgspec.structs.replace(self, answer=self.answer.observe((1.0,), seconds))

    def can_be_learned(self) -> bool:
        """See ``Fit``."""
        return self.prefill.can_be_learned(3) and self.step.can_be_learned(3) and self.answer.can_be_learned(1)

    def heir(self) -> Perf:
        """The laws with which another worker of the same kind begins: these, without observations of its own."""
        return Perf(prefill=self.prefill.heir(), step=self.step.heir(), answer=self.answer.heir())


def seed(shape: ModelShape, hardware: Hardware) -> Perf:
    """What arithmetic says: a prefill computes, a decode step reads the weights and the KV."""
    flops_per_s = FLOPS_SHARE * hardware.flops_per_s
    bytes_per_s = BANDWIDTH_SHARE * hardware.memory_bytes_per_s
    token_s = shape.token_flops / flops_per_s
    step_s = STEP_S + shape.weight_bytes / bytes_per_s
    return Perf(
        prefill=start(step_s, token_s, shape.attention_flops / flops_per_s),
        step=start(step_s, token_s, shape.kv_token_bytes / bytes_per_s),
        answer=start(ANSWER_S),
    )
