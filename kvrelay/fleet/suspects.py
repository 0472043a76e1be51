"""Requests whose workers die, one after the other. It must never count one death for less because it was told of by
one request after the other."""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.errors import Harmful
from kvrelay.fleet.flight import Flight, PromptLeg
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.suspect import DEADLY, Blame

TOGETHER_S = 5.0
"""Losses of one worker within so long of each other are one death: each of its requests notices by itself."""
MAX_CROWDS = 1024


class Crowd(NamedTuple):
    """What a worker had when it died."""

    requests: int
    told_s: float
    """When a request last said so."""


class Suspects:
    """Of one router."""

    def __init__(self, loads: Loads, fleet: Fleet) -> None:
        self._loads = loads
        self._fleet = fleet
        self._crowds: dict[str, Crowd] = {}
        self.ended = 0
        """Requests that no other worker was to have."""

    def __repr__(self) -> str:
        return f"<Suspects {self.ended} ended>"

    def decode_lost(self, flight: Flight, reason: str, now: float) -> None:
        """The request has lost its D, and holds its place there still. Raises ``Harmful`` when that is enough."""
        if flight.writes:
            flight.blame = Blame()
        elif self._is_death(flight.decode.worker, reason, flight.asked_s):
            held = flight.decode
            flight.blame = flight.blame.another(held.sequences / self._crowd(held.worker, now))
            if flight.blame.is_enough:
                self.ended += 1
                raise Harmful(why(flight.blame))

    def prefill_lost(self, leg: PromptLeg, reason: str, now: float) -> None:
        """Its P died or stands still, and the prompt holds its place there still."""
        held = leg.reservation
        if held is not None and self._is_death(held.worker, reason, leg.sent_s):
            leg.blame = leg.blame.another(1.0 / self._crowd(held.worker, now))
            self.ended += leg.blame.is_enough

    def _is_death(self, worker: str, reason: str, asked_s: float) -> bool:
        """Whether the request may be why. Who was not heard since it was asked may have stood still before: what hangs
        an engine alone does not keep its worker from saying that it lives."""
        member = self._fleet.workers.get(worker)
        unheard = member is None or member.heard_s <= asked_s
        return reason in DEADLY and not (reason == "silent" and unheard)

    def _crowd(self, worker: str, now: float) -> int:
        """All that it had: whoever tells of it later finds fewer there."""
        has = max(1, self._loads.running[worker] + self._loads.prefill_legs[worker])
        crowd = self._crowds.get(worker)
        if crowd is not None and now - crowd.told_s <= TOGETHER_S:
            has = max(has, crowd.requests)
        elif len(self._crowds) >= MAX_CROWDS:
            self._crowds.clear()
        self._crowds[worker] = Crowd(has, now)
        return has


def why(blame: Blame) -> str:
    """A sentence for its client."""
    return (
        f"{blame.deaths} workers in a row failed or stood still while they had this request and before they answered "
        "it; no other one is asked. Change the request, or look into their logs, before it is sent again"
    )
