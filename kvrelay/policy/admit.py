"""Accept a request or refuse it early. It must never let a request in that nobody can serve."""

from __future__ import annotations

from kvrelay.types import Value

MAX_IN_FLIGHT = 4096
"""Requests that one router holds at a time; bounds its sockets and its memory."""
RETRY_AFTER_S = 1.0


class Accepted(Value, frozen=True, kw_only=True):
    """Go on."""


class Turned(Value, frozen=True, kw_only=True):
    """Turned away; ``reason`` is a sentence for the client."""

    reason: str
    after_s: float = RETRY_AFTER_S


def admit(*, in_flight: int, decoders: int, back_in_s: float = 0.0, limit: int = MAX_IN_FLIGHT) -> Accepted | Turned:
    """Whether one more request may enter, given ``decoders`` usable workers that can answer it.

    Without any, the first that only failed too often is tried again in ``back_in_s``.
    """
    if decoders == 0:
        why = "no worker that can write answers is ready; retry, or look at /health for why"
        return Turned(reason=why, after_s=max(RETRY_AFTER_S, back_in_s))
    if in_flight >= limit:
        return Turned(reason=f"{in_flight} requests are in flight, the most this router takes; retry later")
    return Accepted()
