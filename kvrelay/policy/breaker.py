"""When a worker that answers with failures gets no more requests, and when it is tried again. A frozen value: each
outcome makes the next one."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from kvrelay.types import Value

FAILURES_TO_OPEN = 5
"""Failures without a success between them. One may be the request's own fault, five are not."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""The pause doubles with every probe that fails, up to this."""


class State(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"
    """One request is on its way to see whether the worker is well again; no others follow it."""


class Breaker(Value, frozen=True, kw_only=True):
    """One worker's breaker. Refusals that blame the request (4xx) are answers: they count as success."""

    state: State = State.CLOSED
    failures: int = 0
    """Since the last success."""
    failing_since_s: float = math.inf
    """When the first of them came."""
    pause_s: float = FIRST_PAUSE_S
    """The current pause when open, the next one when closed."""
    opened_s: float = 0.0
    probe: str = ""
    """What was sent to probe: its key."""
    failures_to_open: int = FAILURES_TO_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now."""
        return self.state is State.CLOSED or (self.state is State.OPEN and self.wait_s(now) == 0.0)

    def wait_s(self, now: float) -> float:
        """Seconds until it allows a probe; 0 when it allows one now."""
        if self.state is State.CLOSED:
            return 0.0
        return max(0.0, self.opened_s + self.pause_s - now)

    def sent(self, key: str) -> Breaker:
        """The request ``key`` was sent; through an open breaker it is the probe."""
        if self.state is not State.OPEN:
            return self
        return msgspec.structs.replace(self, state=State.PROBING, probe=key)

    def succeeded(self, key: str, asked_s: float) -> Breaker:
        """The request ``key``, asked at ``asked_s``, was answered. What was asked before the first failure says nothing
        of how the worker is now: a long answer may end well where nothing new begins."""
        is_well = self._probes(key) or asked_s >= self.failing_since_s
        return Breaker(failures_to_open=self.failures_to_open) if is_well else self

    def failed(self, key: str, now: float) -> Breaker:
        """The request ``key`` failed. While a probe is on its way, that of another one only counts."""
        failures, since_s = self.failures + 1, min(now, self.failing_since_s)
        is_over = self._probes(key)
        if self.state is State.OPEN or is_over or (self.state is State.CLOSED and failures >= self.failures_to_open):
            pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s) if is_over else self.pause_s
            return msgspec.structs.replace(
                self,
                state=State.OPEN,
                failures=failures,
                failing_since_s=since_s,
                pause_s=pause_s,
                opened_s=now,
                probe="",
            )
        return msgspec.structs.replace(self, failures=failures, failing_since_s=since_s)

    def gave_up(self, key: str, now: float) -> Breaker:
        """The request ``key`` ended and says nothing of the worker; if it was the probe, the next one may be."""
        if not self._probes(key):
            return self
        return msgspec.structs.replace(self, state=State.OPEN, opened_s=now - self.pause_s)

    def _probes(self, key: str) -> bool:
        return self.state is State.PROBING and key == self.probe
