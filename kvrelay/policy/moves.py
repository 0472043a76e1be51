"""How long bytes are on their way, over a link between two stores or from a store into an engine: latency, bandwidth,
and the bytes in flight already. It must never be made slower by time in which the sender had nothing to send."""

from __future__ import annotations

import msgspec

from kvrelay.policy.fit import Fit, start
from kvrelay.types import Value

LINK_LATENCY_S = 0.005
"""Seed: layer-wise pushes leave 5 to 8 ms that compute does not hide, whatever the prompt (Splitwise)."""
LINK_BYTES_PER_S = 1e9
"""Seed: TCP on 10G reaches 1.1 GB/s, on 25G 2.8."""
MIN_SEEN_S = 1e-4
"""Shorter stretches are noise of two clocks."""


RESTORE_LATENCY_S = 0.0005
RESTORE_BYTES_PER_S = 5e9
"""Seed: a memory copy by one core. Host memory is the only tier that stores report pages of; a slower one would need a
way of its own here."""


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

    def can_be_learned(self) -> bool:
        """See ``Fit``."""
        return self.latency.can_be_learned(1) and self.per_byte.can_be_learned(1)

    def seconds(self, size_bytes: float, in_flight_bytes: float = 0.0) -> float:
        """Predicted time from the first byte sent to the last one received."""
        return self.latency_s + self.s_per_byte * (size_bytes + in_flight_bytes)

    def exposed_s(self, size_bytes: float, in_flight_bytes: float, hidden_s: float) -> float:
        """What is left of a push when the compute beside it, ``hidden_s`` long, is done."""
        return self.latency_s + max(0.0, self.s_per_byte * (size_bytes + in_flight_bytes) - hidden_s)

    def saw(self, size_bytes: float, seconds: float) -> Move:
        """A move that nothing hides took ``seconds``: a small one tells of latency, a large one of bandwidth."""
        moved_s = self.s_per_byte * size_bytes
        if moved_s > self.latency_s:
            return self.saw_moving(size_bytes, max(seconds / 2, seconds - self.latency_s))
        return self._saw_latency(seconds - moved_s)

    def saw_moving(self, size_bytes: float, moving_s: float) -> Move:
        """Bytes came in for ``moving_s``; time in which the sender had nothing to send is not counted."""
        return msgspec.structs.replace(self, per_byte=self.per_byte.observe((size_bytes,), moving_s))

    def saw_exposed(self, late_bytes: float, exposed_s: float) -> Move:
        """A push went on for ``exposed_s`` after the compute beside it, when ``late_bytes`` were still to move."""
        late_s = self.s_per_byte * late_bytes
        # Of a push that was far behind, the rest is all error of the bandwidth.
        return self if late_s > exposed_s / 2 else self._saw_latency(exposed_s - late_s)

    def _saw_latency(self, seconds: float) -> Move:
        return msgspec.structs.replace(self, latency=self.latency.observe((1.0,), max(MIN_SEEN_S, seconds)))


def link() -> Move:
    """The seed of a link between two stores."""
    return Move(latency=start(LINK_LATENCY_S), per_byte=start(1.0 / LINK_BYTES_PER_S))


def restore() -> Move:
    """The seed of a load from a store's memory into an engine beside it."""
    return Move(latency=start(RESTORE_LATENCY_S), per_byte=start(1.0 / RESTORE_BYTES_PER_S))
