"""Workers and ways as vectors, for tests of costs and choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.policy.cost import Kind, Prompt, Readers, Source, Sources, Ways, Writers
from kvrelay.policy.fit import Floats

PREFILL_RATES = (0.0, 1e-3, 0.0)
"""A millisecond a token."""
STEP_RATES = (0.01, 1e-3, 1e-6)
ANSWER_S = 0.01


def prompt(tokens: int = 1000, *, sequences: int = 1, output_tokens: float = 100.0) -> Prompt:
    return Prompt(tokens=tokens, sequences=sequences, output_tokens=output_tokens)


def floats(values: Sequence[float] | float, count: int) -> Floats:
    return np.array([values] * count if isinstance(values, int | float) else values, dtype=np.float64)


def readers(
    count: int,
    prefix: str = "p",
    *,
    queue_s: Sequence[float] | float = 0.0,
    cached: Sequence[float] | float = 0.0,
    last_chosen: Sequence[int] | None = None,
    rates: tuple[float, float, float] = PREFILL_RATES,
    more: Sources | None = None,
    token_bytes: float = 1000.0,
) -> Readers:
    held = Sources((Source(Kind.ENGINE),), floats(cached, count)[np.newaxis], np.zeros((1, count)))
    return Readers(
        names=tuple(f"{prefix}{number}" for number in range(count)),
        rates=np.array([rates] * count).reshape(count, 3).T,
        queue_s=floats(queue_s, count),
        sources=held if more is None else held.plus(more),
        token_bytes=floats(token_bytes, count),
        last_chosen=np.array(last_chosen if last_chosen is not None else [0] * count, dtype=np.int64),
    )


def writers(
    count: int,
    *,
    sequences: Sequence[float] | float = 0.0,
    usual: Sequence[float] | float = 1.0,
    kv: Sequence[float] | float = 0.0,
    capacity: Sequence[float] | float = 100_000.0,
    remaining: float = 100.0,
    computes: bool = False,
    cached: Sequence[float] | float = 0.0,
    queue_s: Sequence[float] | float = 0.0,
    last_chosen: Sequence[int] | None = None,
) -> Writers:
    return Writers(
        readers=readers(count, "d", cached=cached, queue_s=queue_s, last_chosen=last_chosen),
        step_rates=np.array([STEP_RATES] * count).reshape(count, 3).T,
        answer_s=floats(ANSWER_S, count),
        sequences=floats(sequences, count),
        usual_sequences=floats(usual, count),
        kv_tokens=floats(kv, count),
        kv_capacity_tokens=floats(capacity, count),
        remaining_tokens=floats(remaining, count),
        computes=np.full(count, computes),
    )


def ways(
    reading: int,
    writing: int,
    *,
    latency_s: float = 0.005,
    bytes_per_s: float = 1e9,
    in_flight: float = 0.0,
    stored: Sequence[float] | float = 0.0,
) -> Ways:
    shape = (reading, writing)
    return Ways(
        allowed=np.full(shape, True),
        latency_s=np.full(shape, latency_s),
        s_per_byte=np.full(shape, 1 / bytes_per_s),
        in_flight_bytes=np.full(shape, in_flight),
        stored_tokens=np.broadcast_to(floats(stored, writing), shape),
    )


def source(kind: Kind, tokens: Sequence[float], seconds: Sequence[float], origin: str = "") -> Sources:
    """One more source, ``[worker]`` each."""
    return Sources((Source(kind, origin),), np.array([tokens], np.float64), np.array([seconds], np.float64))
