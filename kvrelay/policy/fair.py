"""Deficit round robin between tenants, on predicted seconds: a tenant with few long requests and one with many short
ones wait equally long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvrelay.types import Value

QUANTUM_S = 0.05
"""Credit of one round for a share of 1. Smaller than most prompts, so that short ones do not overtake by rounding."""


class Share(Value, frozen=True, kw_only=True):
    """One tenant with queued requests, as the round robin sees it."""

    credit_s: float
    """Credit left over from its last turn, in predicted seconds."""
    head_s: float
    """Predicted seconds of its next request."""
    weight: float


class Line(Value, frozen=True, kw_only=True):
    """All queued requests of one tenant."""

    waiting_s: float
    weight: float


class NextTurn(Value, frozen=True, kw_only=True):
    """Position of the tenant to serve, and the credits of all tenants afterwards."""

    position: int
    credits_s: tuple[float, ...]


def next_turn(shares: Sequence[Share]) -> NextTurn:
    """The tenant that is served next. ``shares``: in the order of the round, the tenant after the last served one
    first.

    The result is that of adding a quantum to each in turn until one can pay, without the loop. Raises ValueError for no
    shares."""
    rounds = [_rounds(share) for share in shares]
    position = min(range(len(shares)), key=lambda index: (rounds[index], index))
    credits_s = [share.credit_s + rounds[position] * QUANTUM_S * share.weight for share in shares]
    credits_s[position] -= shares[position].head_s
    return NextTurn(position=position, credits_s=tuple(credits_s))


def ahead_s(own: Line, own_s: float, others: Iterable[Line]) -> float:
    """Seconds of work that go before a request of ``own_s`` that comes behind its tenant's ``own`` line.

    Until its turn every other tenant is served what its weight allows beside that, and no more than it has. Right up to
    one request of each.
    """
    until_s = (own.waiting_s + own_s) / own.weight
    return own.waiting_s + sum(min(line.waiting_s, until_s * line.weight) for line in others)


def _rounds(share: Share) -> int:
    """Quanta until this one can pay for what it wants."""
    return max(0, math.ceil((share.head_s - share.credit_s) / (QUANTUM_S * share.weight)))
