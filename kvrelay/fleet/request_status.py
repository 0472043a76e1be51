"""Tells operators what a request in flight waits for. It must never change anything of that."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.fleet.door import Door
from kvrelay.fleet.flight import Flight, LegState
from kvrelay.fleet.recovery import Recovery
from kvrelay.fleet.silences import Silences
from kvrelay.fleet.workers import Fleet
from kvrelay.types import Value


class RequestStatus(Value, frozen=True, kw_only=True):
    """What one request waits for, JSON-ready. Seconds are until now, unless they say otherwise."""

    waits_for: str
    """``admission``: to be let in; ``pace``: its turn, since prompts of lost answers are computed one after the other;
    ``writer``: a worker that could write a lost answer, or its rest; ``prefix``: KV that
    another request computes; ``prefill``: P; ``decode``: a word of D; ``client``: nothing here."""
    waits_s: float | None = None
    given_up_s: float | None = None
    """Longest wait: then the request is refused, or, when its decode worker shows no progress either, goes on
    elsewhere."""
    begun: bool = False
    """At least one token of the answer was written."""
    resumes: int = 0
    """How often the answer lost its decode worker."""
    decode: dict[str, object] | None = None
    prefills: tuple[dict[str, object], ...] = ()
    """For each prompt: its state, its transfer, and its worker."""


class RequestStatuses:
    """Tells the status of any request of one router."""

    def __init__(
        self, flights: Mapping[str, Flight], fleet: Fleet, door: Door, silences: Silences, recovery: Recovery
    ) -> None:
        self._flights = flights
        self._fleet = fleet
        self._door = door
        self._silences = silences
        self._recovery = recovery

    def __repr__(self) -> str:
        return f"<RequestStatuses of {len(self._flights)} requests>"

    def of(self, request_id: str, silent_since_s: float | None, now: float, gap_s: float = 0.0) -> RequestStatus:
        """``silent_since_s``: since when its D owes it a word; None when it owes it none. ``gap_s`` usually lies
        between two of them; 0: there were no two."""
        flight = self._flights.get(request_id)
        if flight is None:
            return self._at_the_door(request_id, now)
        waits_for, since_s, given_up_s = self._awaited(flight, silent_since_s, now, gap_s)
        return RequestStatus(
            waits_for=waits_for,
            waits_s=None if since_s is None else now - since_s,
            given_up_s=given_up_s,
            begun=flight.writes or flight.resumes > 0,
            resumes=flight.resumes,
            decode=self._worker(flight.decode.worker, now),
            prefills=tuple(
                {"state": leg.state.value, "pages_over": leg.transfer_over, "transfer": leg.transfer}
                | self._worker(leg.worker, now)
                for leg in flight.legs
            ),
        )

    def _at_the_door(self, request_id: str, now: float) -> RequestStatus:
        waiting = self._door.waiting.find(request_id)
        if waiting is None:
            return RequestStatus(waits_for="client")
        limit_s = waiting.until_s - waiting.since_s
        return RequestStatus(waits_for="admission", waits_s=now - waiting.since_s, given_up_s=limit_s)

    def _awaited(
        self, flight: Flight, silent_since_s: float | None, now: float, gap_s: float
    ) -> tuple[str, float | None, float | None]:
        """What for, since when, and for how long at most where that is known."""
        lost = self._recovery.waiting(flight.request_id)
        if lost is not None and lost.nobody_since_s is not None:
            return "writer", lost.nobody_since_s, self._recovery.leave_s
        if lost is not None:
            return "pace", lost.since_s, None
        if silent_since_s is not None:
            return "decode", silent_since_s, self._silences.silence_s(flight.decode.worker, now, gap_s)
        if flight.dispatched:
            return "client", None, None
        held = any(leg.state is LegState.HELD for leg in flight.legs) or not flight.legs
        return "prefix" if held else "prefill", flight.heard_s, None

    def _worker(self, name: str, now: float) -> dict[str, object]:
        member = self._fleet.workers.get(name)
        if member is None:
            return {"worker": name, "known": False}
        return {
            "worker": name,
            "usable": self._fleet.workers.is_usable(name, now),
            "healthy": member.healthy,
            "left": member.left,
            "draining": member.draining,
            "stalled": member.stalled_s is not None,
            "links": member.links,
            "heard_s": now - member.heard_s,
            "progress_s": now - member.progress_s,
        }
