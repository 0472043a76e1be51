"""Lets requests in: new ones at once, and those that wait when their turn comes. It must never start one that the door
did not let through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvrelay.errors import Overloaded
from kvrelay.fleet.chooser import Chooser
from kvrelay.fleet.door import Door
from kvrelay.fleet.flight import Ask, Command, Flight, Plan, Start, Waits
from kvrelay.fleet.ground import Ground
from kvrelay.fleet.launch import Launcher
from kvrelay.fleet.ledger import Timeline
from kvrelay.fleet.pick import Pick
from kvrelay.policy.admit import RETRY_AFTER_S


class Admission:
    """Of all requests of one router."""

    def __init__(self, flights: dict[str, Flight], chooser: Chooser, launcher: Launcher, door: Door) -> None:
        self._flights = flights
        self._chooser = chooser
        self._launcher = launcher
        self._door = door
        self._of_tenant: Counter[str] = Counter()
        """Requests that are in flight, by tenant."""

    def __repr__(self) -> str:
        return f"<Admission of {len(self)} requests, {len(self._door)} of them not begun>"

    def __len__(self) -> int:
        return len(self._flights) + len(self._door)

    def begin(self, ask: Ask, now: float) -> Plan | Waits:
        """Choose and reserve for a new request, or let it wait. Raises ``Overloaded``."""
        ground = self._chooser.ground(ask.facts.model, now)
        self._door.check(ask, ground, in_flight=len(self), own=self._of_tenant[ask.tenant], now=now)
        pick = self._chooser.begin(ask, ground, now)
        if pick is None:
            raise Overloaded("every worker that can write answers just left; retry", RETRY_AFTER_S)
        goes = self._door.lets_in(ask, pick, ground, alone=not self._flights, now=now)
        begun = self._start(ask, pick, ground, now) if goes else Waits(request_id=ask.facts.request_id)
        self._of_tenant[ask.tenant] += 1
        return begun

    def _start(self, ask: Ask, pick: Pick, ground: Ground, now: float) -> Plan:
        flight, plan = self._launcher.start(ask, pick, ground, now)
        self._flights[flight.request_id] = flight
        return plan

    def turns(self, now: float) -> Iterator[Command]:
        """Something was given back or time passed: let in whose turn it is, and turn away who waited too long."""
        yield from self._door.overdue(now)
        for model in self._door.waiting.models():
            yield from self._turns_of(model, now)

    def _turns_of(self, model: str, now: float) -> Iterator[Command]:
        while (head := self._door.waiting.of(model).head()) is not None:
            ground = self._chooser.ground(model, now)
            pick = self._chooser.begin(head.ask, ground, now) if ground.writers else None
            if pick is None or not self._door.has_room(pick, alone=not self._flights, now=now):
                return
            self._door.waiting.take(model)
            yield Start(request_id=head.request_id, plan=self._start(head.ask, pick, ground, now))

    def leave(self, request_id: str, *, status: int, now: float) -> Timeline | None:
        """A request is over that was not begun; None when it was."""
        ask = self._door.leave(request_id)
        if ask is None:
            return None
        self._forget(ask.tenant)
        return self._launcher.never_started(ask, status=status, now=now)

    def land(self, request_id: str) -> Flight:
        """A request is over that was begun."""
        flight = self._flights.pop(request_id)
        self._forget(flight.timeline.tenant)
        return flight

    def _forget(self, tenant: str) -> None:
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def check_invariants(self) -> None:
        """Raise AssertionError unless every request in flight is counted for its tenant."""
        assert self._of_tenant.total() == len(self), f"{self._of_tenant} of {len(self)} requests"
