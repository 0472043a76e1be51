"""What one choice costs, itemised, so that a decision can say why. It must never read the fleet itself."""

from __future__ import annotations

from kvrelay.types import Value

MIN_FREE_SHARE = 0.01
"""Free KV share below which the price of a block stops rising: an overfull worker stays comparable."""


class Cost(Value, frozen=True, kw_only=True):
    """Named parts and their sum. One pool's costs share a unit: tokens for P, sequences for D."""

    parts: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(amount for _, amount in self.parts)


class PrefillLoad(Value, frozen=True, kw_only=True):
    """One P worker as a prompt sees it."""

    worker: str
    queued_tokens: int
    """Uncached tokens promised to it and not yet computed."""
    cached_tokens: int
    """Tokens of this prompt that it probably holds."""
    last_chosen: int
    """Order of its last choice; breaks ties, so that equals take turns."""


class DecodeLoad(Value, frozen=True, kw_only=True):
    """One D worker as a request sees it."""

    worker: str
    sequences: int
    kv_tokens: int
    """KV promised to its requests, in tokens."""
    kv_capacity_tokens: int
    last_chosen: int


def uncached_tokens(prompt_tokens: int, cached_tokens: int) -> int:
    """Tokens that P has to compute: at least one, since an engine never skips the last token."""
    return max(1, prompt_tokens - cached_tokens)


def prefill_cost(load: PrefillLoad, prompt_tokens: int) -> Cost:
    """Tokens that ``load`` computes until this prompt is done."""
    own = uncached_tokens(prompt_tokens, load.cached_tokens)
    return Cost(parts=(("queued_tokens", float(load.queued_tokens)), ("prompt_tokens", float(own))))


def kv_pressure(kv_tokens: int, capacity_tokens: int) -> float:
    """Rising price of a worker's last free KV: 1 at half full, 9 at nine tenths, then linear."""
    share = kv_tokens / max(1, capacity_tokens)
    return share / max(MIN_FREE_SHARE, 1.0 - share)


def decode_cost(load: DecodeLoad, sequences: int, kv_tokens: int) -> Cost:
    """Sequences that share ``load``'s steps once this request is there, and the price of the KV it takes."""
    pressure = kv_pressure(load.kv_tokens + kv_tokens, load.kv_capacity_tokens)
    return Cost(parts=(("sequences", float(load.sequences + sequences)), ("kv_pressure", pressure)))
