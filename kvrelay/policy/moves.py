"""How long bytes are on their way: over a link between two stores, or up from a tier. Bandwidth, latency, and what is
in flight already; learned like everything that is predicted."""

from __future__ import annotations

import math

import msgspec

from kvrelay.policy.fit import Fit, start
from kvrelay.types import Value

LINK_LATENCY_S = 0.005
"""Seed: layer-wise pushes leave 5 to 8 ms that compute does not hide, whatever the prompt (Splitwise)."""
LINK_BYTES_PER_S = 1e9
"""Seed: TCP on 10G reaches 1.1 GB/s, on 25G 2.8."""
MIN_SEEN_S = 1e-4
"""Shorter stretches are noise of two clocks."""


class Tier(Value, frozen=True, kw_only=True):
    """What is believed of a tier before anything was restored from it."""

    latency_s: float
    bytes_per_s: float


TIERS = {
    "memory": Tier(latency_s=0.0005, bytes_per_s=5e9),
    "disk": Tier(latency_s=0.002, bytes_per_s=1e9),
    "object": Tier(latency_s=0.05, bytes_per_s=2e8),
}
"""A memory copy by one core, an NVMe disk, an object store in the same region: orders of magnitude, to be learned."""


class Move(Value, frozen=True, kw_only=True):
    """One way for bytes. Latency and bandwidth are two laws: no machine makes both slow by one factor."""

    latency: Fit
    per_byte: Fit
    """Against the bytes, those that were in flight before included."""

    @property
    def latency_s(self) -> float:
        return self.latency.rates[0]

    @property
    def s_per_byte(self) -> float:
        return self.per_byte.rates[0]

    def seconds(self, size_bytes: float, in_flight_bytes: float = 0.0) -> float:
        """From the first byte sent to the last one in."""
        return self.latency_s + self.s_per_byte * (size_bytes + in_flight_bytes)

    def exposed_s(self, size_bytes: float, in_flight_bytes: float, hidden_s: float) -> float:
        """What is left of a push when the compute beside it, ``hidden_s`` long, is done."""
        return self.latency_s + max(0.0, self.s_per_byte * (size_bytes + in_flight_bytes) - hidden_s)

    def saw(self, size_bytes: float, in_flight_bytes: float, seconds: float) -> Move:
        """A move took ``seconds``, beside nothing that hides it."""
        return self.saw_exposed(size_bytes, in_flight_bytes, 0.0, seconds)

    def saw_exposed(self, size_bytes: float, in_flight_bytes: float, hidden_s: float, exposed_s: float) -> Move:
        """A push beside ``hidden_s`` of compute went on for ``exposed_s`` after it.

        Bandwidth is learned when the bytes came sooner than it allows, or when it explains what was seen better than
        latency does: a push that compute hides says nothing about the link.
        """
        moved_s = self.s_per_byte * (size_bytes + in_flight_bytes)
        late_s = max(MIN_SEEN_S, exposed_s - max(0.0, moved_s - hidden_s))
        whole_s = hidden_s + max(MIN_SEEN_S, exposed_s)
        moving_s = max(whole_s - self.latency_s, whole_s / 2)
        if moved_s > whole_s or _surprise(moving_s, moved_s) < _surprise(late_s, self.latency_s):
            fit = self.per_byte.observe((size_bytes + in_flight_bytes,), moving_s)
            return msgspec.structs.replace(self, per_byte=fit)
        return msgspec.structs.replace(self, latency=self.latency.observe((1.0,), late_s))


def _surprise(seen_s: float, predicted_s: float) -> float:
    return abs(math.log(seen_s / predicted_s)) if predicted_s > 0.0 else math.inf


def link() -> Move:
    """A link between two stores that nothing is known of."""
    return Move(latency=start(LINK_LATENCY_S), per_byte=start(1.0 / LINK_BYTES_PER_S))


def tier(name: str) -> Move:
    """A tier that nothing was restored from. Raises KeyError for a name that is not in ``TIERS``."""
    believed = TIERS[name]
    return Move(latency=start(believed.latency_s), per_byte=start(1.0 / believed.bytes_per_s))
