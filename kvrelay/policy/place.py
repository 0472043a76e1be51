"""Whether a second copy of pages is worth its bytes: the seconds that a death would cost, against those that moving and
keeping them costs everybody else. It must never spend more than its budget, however much is at stake."""

from __future__ import annotations

import math

import msgspec

from kvrelay.types import Value

DEATHS_PER_S = 1 / (30 * 86_400)
"""Rate at which a node dies: once a month."""
KEEP_FREE_SHARE = 0.1
"""Share of a store that copies leave free: the pages that would go to make room are nearly always worth more than a
copy."""


class Stake(Value, frozen=True, kw_only=True):
    """Pages that one node alone has."""

    seconds: float
    """Predicted time to compute them again."""
    bytes: int
    left_s: float
    """How long they will still be needed."""


class Room(Value, frozen=True, kw_only=True):
    """Where a copy would go."""

    free_share: float
    """Free share of the store's memory."""
    waiting_s: float
    """Time that the transfers under way to the store still take: they would share the link with the copy."""
    copy_s: float
    """How long the copy takes, behind that."""


def value_s_per_byte(stake: Stake, deaths_per_s: float = DEATHS_PER_S) -> float:
    """Expected seconds that are lost without the copy, for each of its bytes."""
    return -math.expm1(-deaths_per_s * stake.left_s) * stake.seconds / stake.bytes if stake.bytes else 0.0


def price_s_per_byte(stake: Stake, room: Room) -> float:
    """Expected seconds that others lose by it: those whose bytes share the link."""
    if room.free_share < KEEP_FREE_SHARE:
        return math.inf
    shared_s = min(room.waiting_s, room.copy_s)
    return shared_s / stake.bytes if stake.bytes else 0.0


def is_worth_it(stake: Stake, room: Room, deaths_per_s: float = DEATHS_PER_S) -> bool:
    """Whether to copy now."""
    return value_s_per_byte(stake, deaths_per_s) > price_s_per_byte(stake, room)


class Budget(Value, frozen=True, kw_only=True):
    """A token bucket of bytes, as deep as a second's worth. One large copy may overdraw it."""

    bytes_per_s: float
    spent_bytes: float = 0.0
    at_s: float = 0.0

    def _spent(self, now: float) -> float:
        return max(0.0, self.spent_bytes - self.bytes_per_s * max(0.0, now - self.at_s))

    def allows(self, now: float) -> bool:
        return self.bytes_per_s > 0 and self._spent(now) < self.bytes_per_s

    def spend(self, size_bytes: int, now: float) -> Budget:
        return msgspec.structs.replace(self, spent_bytes=self._spent(now) + size_bytes, at_s=now)
