"""Workers and ways as columns, for tests of costs and choices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvrelay.policy.cost import Coming, DecodeColumns, Hints, Kind, Offer, PrefillColumns, Prompt, Source, Ways
from kvrelay.policy.laws import Laws

PREFILL_RATES = (0.0, 1e-3, 0.0)
"""A millisecond a token."""
STEP_RATES = (0.01, 1e-3, 1e-6)
ANSWER_S = 0.01


def prompt(tokens: int = 1000, *, sequences: int = 1, output_tokens: float = 100.0) -> Prompt:
    return Prompt(tokens=tokens, sequences=sequences, output_tokens=output_tokens)


def floats(values: Sequence[float] | float, count: int) -> list[float]:
    return [float(values)] * count if isinstance(values, int | float) else [float(value) for value in values]


def prefills(
    count: int,
    prefix: str = "p",
    *,
    queue_s: Sequence[float] | float = 0.0,
    passed: Sequence[int] | None = None,
    cached: Sequence[float] | float = 0.0,
    last_chosen: Sequence[int] | None = None,
    rates: tuple[float, float, float] = PREFILL_RATES,
    more: Sequence[Sequence[Offer]] = (),
    token_bytes: float = 1000.0,
) -> PrefillColumns:
    """``more``: further sources, each by worker."""
    held: list[list[Offer]] = [[(Source(Kind.ENGINE), tokens, 0.0)] for tokens in floats(cached, count)]
    for offers in more:
        held = [[*known, offer] for known, offer in zip(held, offers, strict=True)]
    return PrefillColumns(
        names=tuple(f"{prefix}{number}" for number in range(count)),
        rates=Laws([rates] * count),
        queue_s=floats(queue_s, count),
        passed=passed if passed is not None else [0] * count,
        offers=held,
        hints=hints_of(held),
        token_bytes=floats(token_bytes, count),
        last_chosen=last_chosen if last_chosen is not None else [0] * count,
    )


def hints_of(offers: Sequence[Sequence[Offer]]) -> Hints:
    """No worse than ``offers``, and no better."""
    at_hand = [max([tokens for _, tokens, seconds in each if not seconds], default=0.0) for each in offers]
    coming = [
        Coming(to=[at], pages=1, tokens=tokens, first_s=seconds, page_s=0.0)
        for at, each in enumerate(offers)
        for _, tokens, seconds in each
        if seconds
    ]
    return Hints(at_hand=at_hand, stored=[0] * len(offers), coming=coming)


def decodes(
    count: int,
    *,
    sequences: Sequence[float] | float = 0.0,
    running: Sequence[float] | float = 1.0,
    chunk_tokens: float = math.inf,
    kv: Sequence[float] | float = 0.0,
    capacity: Sequence[float] | float = 100_000.0,
    remaining: float = 100.0,
    computes: bool = False,
    cached: Sequence[float] | float = 0.0,
    queue_s: Sequence[float] | float = 0.0,
    passed: Sequence[int] | None = None,
    last_chosen: Sequence[int] | None = None,
) -> DecodeColumns:
    return DecodeColumns(
        as_prefills=prefills(count, "d", cached=cached, queue_s=queue_s, passed=passed, last_chosen=last_chosen),
        step_rates=Laws([STEP_RATES] * count),
        answer_s=floats(ANSWER_S, count),
        sequences=floats(sequences, count),
        running=floats(running, count),
        kv_tokens=floats(kv, count),
        kv_capacity_tokens=floats(capacity, count),
        remaining_tokens=remaining,
        computes=range(count) if computes else (),
        chunk_tokens=[chunk_tokens] * count,
    )


def ways(
    prefill_count: int,
    decode_count: int,
    *,
    latency_s: float = 0.005,
    bytes_per_s: float | Sequence[Sequence[float]] = 1e9,
    in_flight: float = 0.0,
    stored: Sequence[float] | float = 0.0,
    allowed: bool = True,
) -> Ways:
    """Every worker has a store of its own."""
    same = isinstance(bytes_per_s, int | float)
    return Ways(
        prefills=range(prefill_count),
        decodes=range(decode_count),
        allowed=[[allowed] * decode_count] * prefill_count,
        sources=range(prefill_count),
        targets=range(decode_count),
        latency_s=[[latency_s] * decode_count] * prefill_count,
        s_per_byte=[
            [1 / (bytes_per_s if same else bytes_per_s[p][d]) for d in range(decode_count)]  # type: ignore[index, operator]
            for p in range(prefill_count)
        ],
        in_flight_bytes=[[in_flight] * decode_count] * prefill_count,
        least_s=[latency_s] * prefill_count,
        stored_tokens=[floats(stored, decode_count)] * prefill_count,
    )


def source(kind: Kind, tokens: Sequence[float], seconds: Sequence[float], origin: str = "") -> list[Offer]:
    """One more source, by worker."""
    return [(Source(kind, origin), float(length), float(s)) for length, s in zip(tokens, seconds, strict=True)]
