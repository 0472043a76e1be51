"""Accept a request, let it wait, or refuse it early. It must never let a request in that nobody can serve, nor keep one
waiting for an answer that it was promised sooner."""

from __future__ import annotations

from enum import StrEnum

from kvrelay.types import Value

MAX_IN_FLIGHT = 4096
"""Requests that one router holds at a time; bounds its sockets and its memory."""
GREED = 8
"""Places that a tenant may have for each one that is free. A tenant without requests finds a place, however many others
take all that they may; a tenant that is alone gets eight of nine."""
RETRY_AFTER_S = 1.0


class Slo(Value, frozen=True, kw_only=True):
    """What a request was promised, and how it stands to others."""

    ttft_s: float | None = None
    """Longest time to the first token; None: any."""
    tpot_s: float | None = None
    """Longest time per token after it; None: any."""
    priority: int = 0
    """Higher goes first."""
    share: float = 1.0
    """Weight of the request's tenant among tenants of the same priority."""


class Limits(Value, frozen=True, kw_only=True):
    """How many requests there may be, and how long they may wait where."""

    queue_s: float = 2.0
    """Predicted wait at a P beyond which requests wait in the router: there they can still be put in order."""
    hold_s: float = 0.0
    """Longest wait in the router; 0: none waits there."""
    in_flight: int = MAX_IN_FLIGHT
    shared: bool = True
    """Several tenants share the places: none of them may take all."""
    kv_share: float = 1.0
    """Share of each decode worker's KV that this router may promise: other routers of the same workers promise the
    rest."""


class Outlook(Value, frozen=True, kw_only=True):
    """What awaits a request if it goes on now."""

    waited_s: float = 0.0
    """Time since the request was received."""
    ahead_s: float = 0.0
    """Predicted work of the queued requests that go first."""
    ttft_s: float
    queued_s: float = 0.0
    """The part of ``ttft_s`` that is waiting for other requests: it passes while this one waits in the router as
    well."""
    tpot_s: float
    room: bool = True
    """Its workers can take it: D has KV for it, and P's queue is short."""
    overtakes: bool = False
    """The request is much shorter than the queued ones, and its P computes short prompts beside long ones."""
    sure: bool = False
    """What is predicted of prompts comes from measured prefills."""
    guessed_s: float = 0.0
    """The part of ``ttft_s`` that was measured on no such worker all the same."""
    tpot_sure: bool = False
    """``tpot_s`` comes from measured steps."""
    alone: bool = False
    """Nothing else is in flight."""
    trial_due: bool = False
    """So many were refused for their promises that one has to show whether the predictions still hold."""


class Despite(StrEnum):
    """Why a request is let in that is predicted to miss its promise."""

    GUESS = "guess"
    """The prediction comes from data sheets: nobody is refused on a guess."""
    TRIAL = "trial"
    """It shows whether the prediction still holds: refused requests teach nothing."""


class Accepted(Value, frozen=True, kw_only=True):
    """The request may start now."""

    despite: Despite | None = None
    """None: no promise of it is predicted to be broken."""


class Held(Value, frozen=True, kw_only=True):
    """Wait in the router, at most until ``until_s`` after it was received."""

    until_s: float


class Turned(Value, frozen=True, kw_only=True):
    """Turned away; ``reason`` is a sentence for the client, ``kind`` a word for a metric label."""

    reason: str
    kind: str
    after_s: float = RETRY_AFTER_S


def admit(
    *, in_flight: int, own: int = 0, decoders: int, back_in_s: float = 0.0, limit: int = MAX_IN_FLIGHT
) -> Accepted | Turned:
    """Whether one more request may enter, given ``decoders`` usable workers that can answer it. ``own``: those of its
    tenant that are in flight.

    Without any, the first that only failed too often is tried again in ``back_in_s``.
    """
    if decoders == 0:
        why = "no worker that can write answers is ready; retry, or look at /health for why"
        return Turned(reason=why, kind="no_worker", after_s=max(RETRY_AFTER_S, back_in_s))
    if in_flight >= limit:
        why = f"{in_flight} requests are in flight, the most this router takes; retry later"
        return Turned(reason=why, kind="full")
    if own >= GREED * (limit - in_flight):
        why = f"{own} requests of this tenant are in flight, and the places left are kept for others; retry later"
        return Turned(reason=why, kind="tenant")
    return Accepted()


def judge(slo: Slo, outlook: Outlook, limits: Limits) -> Accepted | Held | Turned:
    """What becomes of a request with workers to serve it.

    Waiting never makes a first token come sooner, so a request that would miss it is refused now, while another cluster
    may still make it."""
    ahead_s = 0.0 if outlook.overtakes and outlook.room else outlook.ahead_s
    first_s = outlook.waited_s + ahead_s + outlook.ttft_s
    known_s = first_s - outlook.guessed_s if outlook.sure else 0.0
    known = _late(slo, known_s, outlook.tpot_s if outlook.tpot_sure else 0.0)
    if known is not None and not outlook.trial_due:
        return known
    if limits.hold_s == 0.0 or outlook.alone or (outlook.room and ahead_s == 0.0):
        if known is not None:
            return Accepted(despite=Despite.TRIAL)
        return Accepted(despite=Despite.GUESS if _late(slo, first_s, outlook.tpot_s) else None)
    if ahead_s > limits.hold_s and outlook.sure:  # a guess may be a hundred times too long
        why = f"{ahead_s:.1f} s of work wait before this request; retry later"
        return Turned(reason=why, kind="queue", after_s=max(RETRY_AFTER_S, ahead_s - limits.hold_s))
    return Held(until_s=_until(slo, outlook, limits))


def is_kept(slo: Slo, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Whether an answer with these times has kept what was promised; None: nobody saw it, or there was none."""
    return ttft_s is not None and _late(slo, ttft_s, tpot_s or 0.0) is None


def _late(slo: Slo, first_s: float, tpot_s: float) -> Turned | None:
    """The promise that is broken by a first token after ``first_s`` and others ``tpot_s`` apart."""
    if slo.ttft_s is not None and first_s > slo.ttft_s:
        return _too_late("first token", first_s, slo.ttft_s, "ttft")
    if slo.tpot_s is not None and tpot_s > slo.tpot_s:
        return _too_late("next token", tpot_s, slo.tpot_s, "tpot")
    return None


def _until(slo: Slo, outlook: Outlook, limits: Limits) -> float:
    latest_s = outlook.waited_s + limits.hold_s
    if slo.ttft_s is None:
        return latest_s
    own_s = outlook.ttft_s - outlook.queued_s if outlook.sure else 0.0
    return min(latest_s, slo.ttft_s - own_s)  # later, its workers would compute in vain


def _too_late(what: str, predicted_s: float, promised_s: float, kind: str) -> Turned:
    why = f"the {what} is predicted after {predicted_s:.3g} s, and {promised_s:.3g} s were asked for; retry later"
    return Turned(reason=why, kind=kind, after_s=max(RETRY_AFTER_S, predicted_s - promised_s))
