"""Whose turn it is: deficit round robin on predicted seconds. Who asks for much waits as long as who asks often."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvrelay.types import Value

QUANTUM_S = 0.05
"""Credit of one round for a share of 1. Smaller than most prompts, so that short ones do not overtake by rounding."""


class Share(Value, frozen=True, kw_only=True):
    """One tenant that has something waiting."""

    credit_s: float
    """Left over from its last turn."""
    head_s: float
    """Predicted seconds of what it wants next."""
    weight: float


class Line(Value, frozen=True, kw_only=True):
    """All that one tenant has waiting."""

    waiting_s: float
    weight: float


class NextTurn(Value, frozen=True, kw_only=True):
    """Position of the tenant to serve, and everybody's credit afterwards."""

    position: int
    credits_s: tuple[float, ...]


def next_turn(shares: Sequence[Share]) -> NextTurn:
    """Who is served next; ``shares`` in the order of the round, the one after the last served first.

    The same as to add a quantum in turn until one can pay, without the loop. Raises ValueError for no shares.
    """
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
