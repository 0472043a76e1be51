"""How long the simulated engine and wires take, in seconds of the real clock. No figure stands here: the laws are those
by which the router predicts (``policy.perf``)."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.policy.perf import Perf, prefill_amounts
from kvrelay.types import Value


class Chunk(Value, frozen=True, kw_only=True):
    """Part of a prompt that one step computes."""

    new_tokens: int
    past_tokens: int


class Timing(Value, frozen=True, kw_only=True):
    """The laws of one engine; ``scale`` makes everything as many times as slow."""

    perf: Perf
    scale: float = 1.0

    def step_s(self, chunks: Iterable[Chunk], sequences: int, kv_tokens: int) -> float:
        """One step: chunks of prompts, and a token for each of ``sequences``, which read ``kv_tokens`` together.

        A step begins once, however much is in it: of both laws the longer start counts.
        """
        starts, seconds = [0.0], 0.0
        for chunk in chunks:
            start, *amounts = prefill_amounts(chunk.new_tokens, chunk.past_tokens)
            starts.append(start * self.perf.prefill.rates[0])
            seconds += sum(rate * amount for rate, amount in zip(self.perf.prefill.rates[1:], amounts, strict=True))
        if sequences:
            start, each, read = self.perf.step.rates
            starts.append(start)
            seconds += each * sequences + read * kv_tokens
        return self.scale * (max(starts) + seconds)
