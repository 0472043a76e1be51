"""Lets requests in: new ones at once, and those that wait when their turn comes. It must never start one that the door
did not let through, nor turn one away without a timeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from kvrelay.errors import Overloaded
from kvrelay.fleet.chooser import Chooser
from kvrelay.fleet.door import Door
from kvrelay.fleet.flight import Ask, Command, Flight, Plan, Queued, Refuse, Start
from kvrelay.fleet.launch import Launcher
from kvrelay.fleet.ledger import Timeline
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.topology import Topology
from kvrelay.policy.admit import Accepted, Despite, Held, Turned
from kvrelay.policy.route import Decision

NOBODY = Turned(reason="no worker that takes this prompt and its answer is ready; retry", kind="no_worker")
REFUSED = 503
"""HTTP status of the answer to a request that is refused at once."""


class Admission:
    """Starts the requests of one router, or queues them."""

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

    def begin(self, ask: Ask, now: float) -> Plan | Queued:
        """Choose and reserve for a new request, or let it wait. Raises ``Overloaded``."""
        topology = self._chooser.topology(ask.facts.model, now)
        entry = self._door.check(ask, topology, in_flight=len(self), own=self._of_tenant[ask.tenant], now=now)
        if isinstance(entry, Turned):
            raise self._refused(ask, entry, None, now)
        aside = self._aside(ask, topology, now)
        pick = aside or self._chooser.begin(ask, topology, now)
        if pick is None:
            raise self._refused(ask, NOBODY, None, now)
        verdict = self._door.meet(ask, pick, topology, alone=not self._flights, aside=aside is not None, now=now)
        if isinstance(verdict, Turned):
            raise self._refused(ask, verdict, pick.decision, now)
        begun: Plan | Queued = Queued(request_id=ask.facts.request_id)
        if isinstance(verdict, Accepted):
            begun = self._start(ask, pick, topology, verdict.despite, now)
        self._of_tenant[ask.tenant] += 1
        return begun

    def _aside(self, ask: Ask, topology: Topology, now: float) -> Pick | None:
        """Where a new request can be served at once by workers that are too short for all those that wait for KV: it
        takes nothing that one of them could have. None: nowhere, or nobody waits so."""
        queue, at_most = self._door.waiting.of(ask.facts.model), math.inf
        while (head := queue.head(at_most)) is not None:
            at_most = topology.decode_columns.most_below(head.ask.context_tokens)
            if not at_most or at_most < ask.context_tokens or not self._door.waits_for_kv(head):
                return None
        if at_most == math.inf:  # nobody waits
            return None
        pick = self._chooser.begin(ask, topology, now, at_most)
        return pick if pick is not None and self._door.has_room(pick, alone=False, now=now) else None

    def _refused(self, ask: Ask, turned: Turned, decision: Decision | None, now: float) -> Overloaded:
        self._door.refused[turned.kind] += 1
        self._launcher.never_started(ask, status=REFUSED, now=now, decision=decision, refusal=turned.reason)
        return Overloaded(turned.reason, turned.after_s)

    def _start(self, ask: Ask, pick: Pick, topology: Topology, despite: Despite | None, now: float) -> Plan:
        flight, plan = self._launcher.start(ask, pick, topology, now)
        flight.timeline.despite = despite
        self._flights[flight.request_id] = flight
        return plan

    def turns(self, now: float) -> Iterator[Command]:
        """A reservation was released or time passed: start the queued requests whose turn it is, and refuse those that
        waited too long."""
        yield from self._door.overdue(now)
        for model in self._door.waiting.models():
            yield from self._turns_of(model, now)

    def _turns_of(self, model: str, now: float) -> Iterator[Command]:
        at_most = math.inf
        while (head := self._door.waiting.of(model).head(at_most)) is not None:
            topology = self._chooser.topology(model, now)
            if not topology.decode_workers:
                return
            pick = self._chooser.begin(head.ask, topology, now, at_most)
            if pick is None:
                if self._door.has_outgrown(head):
                    yield self._door.outgrown(head, NOBODY)
                    return
                # The workers that take it are not usable now: it waits for them, and does not delay requests that need
                # less.
                at_most = topology.decode_columns.most_below(head.ask.context_tokens)
                if not at_most:
                    return
                continue
            verdict = self._door.turn(head, pick, alone=not self._flights, at_most=at_most, now=now)
            if isinstance(verdict, Held):
                # A request that waits for KV does not delay requests for which there are workers that it cannot have.
                at_most = topology.decode_columns.most_below(head.ask.context_tokens)
                if not at_most or self._door.has_kv(pick):
                    return
                continue
            if isinstance(verdict, Turned):
                yield Refuse(request_id=head.request_id, reason=verdict.reason, after_s=verdict.after_s)
                return  # its end is the next one's turn: thousands that are late must not be judged in one go
            plan = self._start(head.ask, pick, topology, verdict.despite, now)
            yield Start(request_id=head.request_id, plan=plan)

    def leave(self, request_id: str, *, status: int, now: float) -> Timeline | None:
        """A request is over that was not begun; None when it was."""
        left = self._door.leave(request_id)
        if left is None:
            return None
        self._forget(left.ask.tenant)
        return self._launcher.never_started(
            left.ask, status=status, now=now, decision=left.decision, refusal=left.refusal
        )

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
