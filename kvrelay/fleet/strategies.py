"""What is told of a lost answer: how it was lost, and by which strategy it goes on. It must never choose one."""

from __future__ import annotations

from kvrelay.fleet.flight import Flight, Rest
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.resumption import Resumption
from kvrelay.policy.cost import Kind
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Manner, Strategy


def resumption(flight: Flight, reason: LossReason, rest: Rest, now: float, *, goes_on: bool) -> Resumption:
    """``flight`` loses its D, or leaves it; ``goes_on``: now or later, as far as is known."""
    return Resumption(
        reason=reason,
        lost_worker=flight.decode.worker,
        lost_at=round(now - flight.ask.received_s, 6),
        tokens=rest.tokens,
        manner=rest.manner if goes_on else Manner.FAIL,
        outcome="open" if goes_on else "failed",
    )


def choice(pick: Pick, lost_store: str) -> dict[str, object]:
    """Fields of a ``Resumption`` that tell of a choice; ``lost_store`` is that of the worker that was lost."""
    chosen = pick.decision.chosen
    return {
        "worker": pick.decode.name,
        "strategy": strategy(pick, lost_store),
        "cached_tokens": chosen.cached_tokens,
        "prefill_s": round(pick.prefill_s, 6),
    }


def strategy(pick: Pick, lost_store: str) -> Strategy:
    """Where most of what the rest begins with comes from."""
    chosen = pick.decision.chosen
    if 2 * chosen.cached_tokens < pick.tokens:
        return Strategy.PREFILL
    match chosen.source.kind:
        case Kind.ENGINE:
            return Strategy.ENGINE
        case Kind.UNDERWAY:
            return Strategy.UNDERWAY
        case Kind.PEER:
            store = chosen.source.origin
        case Kind.STORE:
            store = pick.computed_on.store
    return Strategy.RESTORE if store == lost_store else Strategy.REPLICA
