"""Milestones of transfers, as stores relay them. It must never take a late or an unknown one for news of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvrelay.fleet.copies import Copies
from kvrelay.fleet.flight import Command, Flight, LegState, PromptLeg
from kvrelay.fleet.ledger import Ledger
from kvrelay.fleet.prefix_waits import PrefixWaits
from kvrelay.fleet.prefixes import Prefixes
from kvrelay.fleet.ways import Ways
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage

_LEG_STATES = {Stage.STARTED: LegState.STARTED, Stage.LAST_CHUNK: LegState.LAST_CHUNK}
_THERE = frozenset({Stage.ARRIVED, Stage.LOADED})
_OVER = _THERE | {Stage.FAILED}


class Milestones:
    """Takes milestones of the transfers that one router has begun, and turns them into commands."""

    def __init__(
        self,
        flights: Mapping[str, Flight],
        ledger: Ledger,
        ways: Ways,
        prefixes: Prefixes,
        waits: PrefixWaits,
        copies: Copies,
        dispatch_if_ready: Callable[[Flight, float], list[Command]],
    ) -> None:
        self._flights = flights
        self._ledger = ledger
        self._ways = ways
        self._prefixes = prefixes
        self._waits = waits
        self._copies = copies
        self._dispatch_if_ready = dispatch_if_ready
        self.unknown = 0
        """Milestones of transfers that this router does not know (any more)."""

    def __repr__(self) -> str:
        return f"<Milestones, {self.unknown} unknown>"

    def heard(self, event: TransferEvent, now: float) -> list[Command]:
        """A store relays one. Late and unknown ones are counted and change nothing else."""
        self._ways.heard(event, now)
        if self._prefixes.pulls.knows(event.transfer):
            return self._waits.heard(event, now)
        if self._copies.knows(event.transfer):
            self._copies.heard(event)
            return []
        timeline = self._ledger.of_transfer(event.transfer)
        if timeline is None:
            self.unknown += 1
            return []
        timeline.note(event, now)
        flight = self._flights.get(timeline.request_id)
        leg = flight.leg_of(event.transfer) if flight is not None else None
        return self._reached(flight, leg, event, now) if flight is not None and leg is not None else []

    def _reached(self, flight: Flight, leg: PromptLeg, event: TransferEvent, now: float) -> list[Command]:
        flight.heard_s = leg.heard_s = now
        if event.stage in _LEG_STATES:
            leg.reached(_LEG_STATES[event.stage], now)
            if event.stage is Stage.STARTED:
                self._prefixes.underway.started(event.transfer, now)
        elif event.stage in _OVER:
            leg.transfer_over, leg.transfer_failed = True, event.stage is Stage.FAILED
        came = self._waits.computed(event.transfer, now) if event.stage in _THERE else []
        return self._dispatch_if_ready(flight, now) + came
