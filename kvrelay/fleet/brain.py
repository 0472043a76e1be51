"""Ties policy to state: events and ``now`` in, plans and commands out. It must never do I/O, read a clock or draw
a random number; the router and the simulator are rims around it."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.errors import Harmful, Overloaded
from kvrelay.fleet.admission import Admission
from kvrelay.fleet.chooser import Chooser
from kvrelay.fleet.copies import Copies
from kvrelay.fleet.decode_orders import DecodeOrders
from kvrelay.fleet.departures import Departures
from kvrelay.fleet.door import Door
from kvrelay.fleet.draining import Drains
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import (
    Ask,
    Command,
    DecodeOrder,
    DispatchDecode,
    Flight,
    LegState,
    Plan,
    Queued,
    Refuse,
    RejectPoison,
)
from kvrelay.fleet.holdings import Holdings
from kvrelay.fleet.index import MAX_PAGES, PageIndex
from kvrelay.fleet.launch import Launcher
from kvrelay.fleet.ledger import Ledger, Timeline
from kvrelay.fleet.lessons import Lessons
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.membership import Membership
from kvrelay.fleet.milestones import Milestones
from kvrelay.fleet.outcomes import Outcomes
from kvrelay.fleet.poison_requests import PoisonRequests
from kvrelay.fleet.prefix_waits import PrefixWaits
from kvrelay.fleet.prefixes import Prefixes
from kvrelay.fleet.recovery import Recovery
from kvrelay.fleet.request_status import RequestStatuses
from kvrelay.fleet.silences import Silences
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.admit import Limits
from kvrelay.policy.loss import LossReason
from kvrelay.policy.patience import longest_hold_s
from kvrelay.policy.recover import patience
from kvrelay.protocol.feed import PageEvents, PageSnapshot, PagesWanted, TransferEvent
from kvrelay.types import Fingerprint, PageName, StoreInfo, WorkerInfo


class Brain:
    """Soft state of one router: members, loads, flights and the ledger."""

    def __init__(
        self,
        *,
        dead_after_s: float,
        transfer_wait_s: float,
        local_prefill: bool = True,
        convert_kv_dtype: bool = False,
        index_pages: int = MAX_PAGES,
        limits: Limits | None = None,
        replicate_share: float = 0.0,
        knows_all: bool = True,
    ) -> None:
        """``knows_all``: no other router has requests at the workers."""
        self._transfer_wait_s = transfer_wait_s
        self.fleet = Fleet(dead_after_s, convert_kv_dtype=convert_kv_dtype)
        self.loads = Loads()
        self.index = PageIndex(index_pages)
        self.ledger = Ledger()
        self.experience = Experience(self.loads.links)
        self._holdings = Holdings(self.fleet, self.index, self.loads.links)
        self.prefixes = Prefixes(self.fleet, self.loads.links, self._holdings, longest_hold_s(transfer_wait_s))
        self.outcomes = Outcomes(self.fleet, self._holdings, Lessons(self.experience, self.loads))
        breakers = self.outcomes.breakers
        views = self.fleet, self.loads, self._holdings, self.experience, breakers, self.prefixes.finder
        self._chooser = Chooser(*views, local_prefill=local_prefill)
        self._launcher = Launcher(self._chooser, self.loads, self.ledger, self.outcomes, self.prefixes, self.fleet.ways)
        self.members = Membership(self.fleet, self.index, self._holdings, self.loads, self.experience, breakers)
        self.door = Door(self.fleet, self.loads, self.experience, breakers, limits or Limits())
        self._decode_orders = DecodeOrders(self.fleet)
        self._flights: dict[str, Flight] = {}
        self._admission = Admission(self._flights, self._chooser, self._launcher, self.door)
        self.drains = Drains(self.fleet, breakers, self.loads, self._flights)
        known = self.fleet, self.index, self._holdings, self.loads, self.experience, self._flights
        self.copies = Copies(*known, replicate_share)
        self.waits = PrefixWaits(self.prefixes, self._launcher, self._flights, self._dispatch_if_ready)
        self._departures = Departures(self._flights, self.waits)
        sources = self.ledger, self.fleet.ways, self.prefixes, self.waits, self.copies
        self.milestones = Milestones(self._flights, *sources, self._dispatch_if_ready)
        self.poison_requests = PoisonRequests(self.loads, self.fleet, breakers, knows_all=knows_all)
        common = self._flights, self.fleet, self.loads, self._chooser, self.poison_requests
        longest = patience(dead_after_s, transfer_wait_s)
        self.silences = Silences(*common, self.experience, longest)
        self.recovery = Recovery(*common, self._launcher, self.outcomes, self.waits, self.silences, longest)
        self.request_statuses = RequestStatuses(self._flights, self.fleet, self.door, self.silences, self.recovery)

    def __repr__(self) -> str:
        return f"<Brain {len(self._flights)} in flight, {self.fleet!r}, {self.loads!r}>"

    @property
    def in_flight(self) -> int:
        return len(self._admission)

    # ------------------------------------------------------------ members

    def register_worker(self, worker: WorkerInfo, now: float) -> list[Command]:
        """A worker says hello. A former incarnation of it is dead, and so is everything that runs there.

        Raises ``Malformed``, ``Refused``.
        """
        if not self.members.register_worker(worker, now):
            return []
        return self._departures.gone(worker.name) + self.waits.flush(now)

    def leaving(self, member: WorkerInfo | StoreInfo, now: float) -> list[Command]:
        """A clean goodbye."""
        if not self.members.leave(member) or isinstance(member, StoreInfo):
            return []
        return self._departures.gone(member.name) + self.waits.flush(now)

    def pages(
        self, member: WorkerInfo | StoreInfo, message: PageEvents | PageSnapshot, now: float
    ) -> tuple[PagesWanted | None, list[Command]]:
        """A member tells of its pages: what to ask it for, and what may go on now."""
        before = self.index.applied
        wanted = self.members.pages(member, message, now)
        news = self.index.applied > before  # else it is of a former life, or something before it is missing
        return wanted, self.waits.pages_seen(member, message, now) if news else []

    def tick(self, now: float) -> list[Command]:
        """Time passed: notice silent members and silent prefills."""
        missing = self.members.expire(now)
        self._chooser.keep_only(self.fleet.models())
        self.copies.expire(now)
        self.experience.fade(now)
        commands = list(self._departures.missing(missing))
        for flight in self._flights.values():
            if now - flight.heard_s > self._transfer_wait_s:
                commands += self._dispatch(flight, now)
        commands += [*self.silences.silent_prefills(now), *self.waits.tick(now)]
        return commands + self.admit_waiting(now)

    def namings(self, model: str, now: float) -> Mapping[PageName, Fingerprint]:
        """How workers of ``model`` name pages: root, and the fingerprint that it comes from."""
        return self._chooser.topology(model, now).namings

    # ------------------------------------------------------------ begin

    def begin(self, ask: Ask, now: float) -> Plan | Queued:
        """Choose and reserve for a new request, or let it wait. Raises ``Overloaded``."""
        return self._admission.begin(ask, now)

    def admit_waiting(self, now: float) -> list[Command]:
        """A reservation was released or time passed: commands for the requests that go on or waited too long."""
        return [*self.waits.flush(now), *self.recovery.turn(now), *self._admission.turns(now)]

    # ------------------------------------------------------------ P legs

    def prefill_sent(self, request_id: str, now: float) -> None:
        flight = self._flights[request_id]
        flight.timeline.mark_first("prefill_sent", now)
        flight.heard_s = now

    def prefill_finished(self, request_id: str, index: int, cached_tokens: int, now: float) -> list[Command]:
        """P answered."""
        flight = self._flights[request_id]
        leg = flight.legs[index]
        leg.reached(LegState.FINISHED, now)
        leg.cached_tokens = min(cached_tokens, leg.prompt_tokens)
        self.outcomes.prefill_finished(leg, now)
        self._launcher.computed(leg, now)
        flight.timeline.computed(leg.transfer, now)
        flight.heard_s = now
        ready = self._dispatch_if_ready(flight, now)
        return ready + self.waits.computed(leg.transfer, now) + self.admit_waiting(now)

    def prefill_failed(
        self, request_id: str, index: int, now: float, *, blamed: bool = True, reason: LossReason | None = None
    ) -> list[Command]:
        """P refused, reset or vanished: another P, unless D is already at work; without one D computes the prompt.

        Not ``blamed``: the router called it off, or the request itself was at fault. ``reason``: how P was lost.
        """
        flight = self._flights[request_id]
        leg = flight.legs[index]
        self.poison_requests.prefill_lost(leg, reason, now)
        self.outcomes.prefill_failed(leg, now, blamed=blamed)
        self._launcher.release(leg, now)
        leg.state = LegState.FAILED
        flight.timeline.lost(leg.transfer)
        self.waits.failed(leg.transfer)
        if (error := self.poison_requests.verdict(leg.crashes)) is not None:
            return [self._turned_away(request_id, error), *self.waits.flush(now)]
        # Before those that waited for it: they may wait for its next attempt.
        assigned = None if flight.dispatched else self._launcher.assign(flight, leg, now)
        again = assigned.commands(request_id) if assigned is not None else self._dispatch_if_ready(flight, now)
        return again + self.waits.flush(now)

    def _turned_away(self, request_id: str, error: Harmful | Overloaded) -> Command:
        if isinstance(error, Harmful):
            return RejectPoison(request_id=request_id, reason=str(error))
        return Refuse(request_id=request_id, reason=str(error), after_s=error.after_s)

    def transfer_event(self, event: TransferEvent, now: float) -> list[Command]:
        """A store relays a milestone."""
        return self.milestones.heard(event, now)

    def _dispatch_if_ready(self, flight: Flight, now: float) -> list[Command]:
        return self._dispatch(flight, now) if flight.ready_for_decode else []

    def _dispatch(self, flight: Flight, now: float) -> list[Command]:
        if flight.dispatched:
            return []
        flight.dispatched = True
        self.waits.drop(flight, now)
        return [DispatchDecode(request_id=flight.request_id)]

    # ------------------------------------------------------------ D leg

    def decode_order(self, request_id: str, now: float) -> DecodeOrder:
        """Where the D leg goes now. Raises ``Unasked`` when that worker is gone."""
        flight = self._flights[request_id]
        flight.timeline.mark("decode_sent", now)
        flight.asked_s = now
        self.loads.asked(flight.decode)
        self.outcomes.decode_asked(flight)
        return self._decode_orders.of(flight, now)

    def decode_refused(
        self, request_id: str, now: float, *, reason: LossReason | None = None
    ) -> DispatchDecode | Queued | None:
        """D failed before its first byte reached the client, for this ``reason``: another one is to be asked, now or
        when the ``DispatchDecode`` comes that is waited for, unless a ``Refuse`` does; None when no other D is left.

        Those that waited for its prompt go on with the next ``waits.flush``. Raises ``Harmful``, ``Overloaded``.
        """
        flight = self._flights[request_id]
        if reason is LossReason.FORGOTTEN:
            self.outcomes.decode_lost(flight, now, blamed=False)
        else:
            self.outcomes.decode_refused(flight, now)
        self.waits.failed(request_id)
        self.poison_requests.decode_lost(flight, reason, now)
        return self.recovery.refused(request_id, reason, now)

    def first_token(self, request_id: str, now: float) -> list[Command]:
        """D writes."""
        flight = self._flights[request_id]
        if flight.resumes:
            return []
        flight.writes, flight.moves = True, 0
        flight.timeline.mark_first("first_token", now)
        self.outcomes.first_token(flight, now)
        self.loads.computed(flight.decode, now)
        return self.waits.computed(request_id, now)

    def answered(self, request_id: str, now: float) -> list[Command]:
        """D wrote the whole answer, which came in one piece: nobody knows when the first token was there."""
        flight = self._flights[request_id]
        self.outcomes.answered(flight, now)
        self.loads.computed(flight.decode, now)
        return self.waits.computed(request_id, now)

    def cached_tokens(self, request_id: str) -> int | None:
        """What the answer's usage says was cached; None: D's own count is right."""
        return self._flights[request_id].cached_tokens

    def finish(self, request_id: str, *, status: int, output_tokens: int, now: float) -> Timeline:
        """The request is over, however it ended: everything it reserved is given back."""
        if (never_begun := self._admission.leave(request_id, status=status, now=now)) is not None:
            return never_begun
        flight = self._admission.land(request_id)
        timeline = flight.timeline
        timeline.cached_tokens = flight.cached_tokens
        timeline.close(status, output_tokens, now)
        self.ledger.over(request_id)
        self.recovery.leave(request_id)
        self.waits.drop(flight, now)
        self.outcomes.finished(flight, now)
        self.door.landed(flight)
        for leg in flight.legs:
            self.waits.failed(leg.transfer)
            self._launcher.release(leg, now)
        self.waits.failed(request_id)
        self.loads.release_decode(flight.decode, now)
        return timeline

    def check_invariants(self) -> None:
        """Raise AssertionError unless what is reserved is exactly what the flights hold."""
        flights = self._flights.values()
        prefills = [reservation for flight in flights for reservation in flight.prefill_reservations()]
        self.loads.check(
            prefills, [flight.decode for flight in flights], [*self.prefixes.pulls.moving(), *self.copies.moving()]
        )
        self._admission.check_invariants()
        self.prefixes.check_invariants()
