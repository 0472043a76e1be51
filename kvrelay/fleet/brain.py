"""Ties policy to state: events and ``now`` in, plans and commands out. It must never do I/O, read a clock or draw
a random number; the router and the simulator are rims around it."""

from __future__ import annotations

from kvrelay.errors import Overloaded
from kvrelay.fleet.chooser import Chooser, DecodePick
from kvrelay.fleet.flight import (
    AbandonDecode,
    AbandonPrefill,
    Ask,
    Command,
    DecodeOrder,
    DispatchDecode,
    Flight,
    LegState,
    Plan,
    PrefillOrder,
    PromptLeg,
    SendPrefill,
)
from kvrelay.fleet.index import PageIndex
from kvrelay.fleet.ledger import Ledger, Timeline
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.workers import Fleet, Handoff, Roster
from kvrelay.policy.admit import RETRY_AFTER_S, Turned, admit
from kvrelay.policy.route import Path
from kvrelay.protocol import Heartbeat, TransferEvent
from kvrelay.types import Fingerprint, Stage, StoreInfo, WorkerInfo

_LEG_STATES = {Stage.STARTED: LegState.STARTED, Stage.LAST_CHUNK: LegState.LAST_CHUNK}


class Brain:
    """Soft state of one router: members, loads, flights and the ledger."""

    def __init__(self, *, dead_after_s: float, transfer_wait_s: float) -> None:
        self._transfer_wait_s = transfer_wait_s
        self.fleet = Fleet(dead_after_s)
        self.loads = Loads()
        self.index = PageIndex()
        self.ledger = Ledger()
        self._chooser = Chooser(self.fleet, self.loads, self.index)
        self._flights: dict[str, Flight] = {}
        self.unknown_transfers = 0
        """Milestones of transfers that this router does not know (any more)."""

    def __repr__(self) -> str:
        return f"<Brain {len(self._flights)} in flight, {self.fleet!r}, {self.loads!r}>"

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    # ------------------------------------------------------------ members

    def register_worker(self, worker: WorkerInfo, now: float) -> list[Command]:
        """A worker says hello. A former incarnation of it is dead, and so is everything that runs there.

        Raises ``Malformed``, ``Refused``.
        """
        if not self.fleet.register_worker(worker, now):
            return []
        self.index.drop(worker.name)
        return self._abandon(worker.name, decode_too=True)

    def register_store(self, store: StoreInfo, now: float) -> None:
        """A store says hello. Raises ``Malformed``, ``Refused``."""
        self.fleet.stores.register(store, now)

    def link(self, member: WorkerInfo | StoreInfo, opened: int) -> None:
        """A link over which ``member`` registered is open (1) or has ended (-1)."""
        self._roster(member).link(member.name, member.incarnation, opened)

    def heartbeat(self, member: WorkerInfo | StoreInfo, beat: Heartbeat, now: float) -> bool:
        """``member`` is what the link registered as; False when another has its name now."""
        roster = self._roster(member)
        return roster.hear(member.name, beat.incarnation, healthy=beat.healthy, counts=beat.counts, now=now)

    def _roster(self, member: WorkerInfo | StoreInfo) -> Roster[WorkerInfo] | Roster[StoreInfo]:
        return self.fleet.workers if isinstance(member, WorkerInfo) else self.fleet.stores

    def leaving(self, member: WorkerInfo | StoreInfo) -> list[Command]:
        """A clean goodbye."""
        if isinstance(member, StoreInfo):
            self.fleet.stores.leave(member.name, member.incarnation)
            return []
        if not self.fleet.workers.leave(member.name, member.incarnation):
            return []
        self.index.drop(member.name)
        return self._abandon(member.name, decode_too=True)

    def tick(self, now: float) -> list[Command]:
        """Time passed: notice silent members and silent prefills."""
        commands: list[Command] = []
        for worker in self.fleet.workers.expire(now):
            # Silence is no proof of death: D's running streams are left alone, a prefill is cheap to do elsewhere.
            commands += self._abandon(worker.name, decode_too=False)
        for worker in self.fleet.workers.given_up(now):
            # At every tick: what is sent there meanwhile by a request that chose it earlier would hang as well.
            commands += self._abandon(worker.name, decode_too=True)
        self.fleet.stores.expire(now)
        known = [member.info.name for member in self.fleet.workers]
        self.loads.keep_only(known)
        self.index.keep_only(known)
        for flight in self._flights.values():
            if now - flight.heard_s > self._transfer_wait_s:
                commands += self._dispatch(flight)
        return commands

    def _abandon(self, worker: str, *, decode_too: bool) -> list[Command]:
        commands: list[Command] = []
        for flight in self._flights.values():
            commands += [
                AbandonPrefill(request_id=flight.request_id, index=leg.index)
                for leg in flight.legs
                if leg.reservation is not None and leg.reservation.worker == worker
            ]
            if decode_too and flight.decode.worker == worker:
                commands.append(AbandonDecode(request_id=flight.request_id))
        return commands

    def naming(self, model: str, now: float) -> Fingerprint | None:
        """Fingerprint under which prompts' pages are named: that of a P worker; None without one."""
        prefillers = self._chooser.prefillers(model, now)
        return prefillers[0].engine.fingerprint if prefillers else None

    # ------------------------------------------------------------ begin

    def begin(self, ask: Ask, now: float) -> Plan:
        """Choose and reserve for a new request. Raises ``Overloaded``."""
        decoders = self._chooser.decoders(ask.facts.model, now)
        verdict = admit(in_flight=self.in_flight, decoders=len(decoders))
        if isinstance(verdict, Turned):
            raise Overloaded(verdict.reason, verdict.after_s)
        pick = self._chooser.decode(ask, (), now)
        if pick is None:
            raise Overloaded("every worker that can write answers just left; retry", RETRY_AFTER_S)
        flight = self._open(ask, pick, now)
        reason = self._chooser.why_local(ask, pick.worker, now)
        orders = () if reason else self._assign_all(flight, pick.worker, now)
        flight.path = Path.REMOTE_PREFILL if orders else Path.LOCAL
        flight.dispatched = not orders
        flight.timeline.path, flight.timeline.local_reason = flight.path.value, reason
        flight.timeline.mark("routed", now)
        return Plan(path=flight.path, local_reason=reason, prefills=orders)

    def _open(self, ask: Ask, pick: DecodePick, now: float) -> Flight:
        facts = ask.facts
        timeline = Timeline(facts.request_id, ask.tenant, ask.received_s, prompt_tokens=sum(facts.prompt_tokens))
        timeline.mark("tokenised", now)
        timeline.decode_worker = pick.worker.name
        timeline.decide("decode", pick.choice)
        flight = Flight(ask=ask, timeline=timeline, decode=pick.reservation, aimed_at=pick.worker, heard_s=now)
        flight.tried_decode.add(pick.worker.name)
        self.loads.reserve_decode(pick.reservation)
        self._flights[facts.request_id] = flight
        self.ledger.open(timeline)
        return flight

    def _assign_all(self, flight: Flight, decode: WorkerInfo, now: float) -> tuple[PrefillOrder, ...]:
        facts = flight.ask.facts
        names = facts.page_names or ((),) * len(facts.prompt_tokens)
        for index, (tokens, pages) in enumerate(zip(facts.prompt_tokens, names, strict=True)):
            flight.legs.append(PromptLeg(index=index, prompt_tokens=tokens, names=pages))
        orders = [self._assign(flight, leg, now) for leg in flight.legs]
        return tuple(order for order in orders if order is not None)

    def _assign(self, flight: Flight, leg: PromptLeg, now: float) -> PrefillOrder | None:
        """Choose and reserve a P for ``leg`` that was not tried yet."""
        pick = self._chooser.prefill(leg, flight.aimed_at, now)
        if pick is None:
            return None
        self.loads.reserve_prefill(pick.reservation)
        self._remember(leg, pick.worker)
        leg.send(f"{flight.request_id}/{leg.index}/{len(leg.tried)}", pick.reservation)
        self.ledger.own(flight.request_id, leg.transfer, leg.prompt_tokens, len(leg.tried) - 1)
        flight.timeline.prefill_worker = pick.worker.name
        flight.timeline.decide("prefill", pick.choice)
        return PrefillOrder(
            index=leg.index,
            worker=pick.worker.name,
            url=pick.worker.url,
            transfer=leg.transfer,
            push_to=pick.handoff.push_to,
        )

    def _remember(self, leg: PromptLeg, worker: WorkerInfo) -> None:
        page_tokens = worker.engine.fingerprint.format.page_tokens
        self.index.add(worker.name, worker.incarnation, leg.names, worker.engine.kv_tokens // page_tokens)

    # ------------------------------------------------------------ P legs

    def prefill_sent(self, request_id: str, now: float) -> None:
        flight = self._flights[request_id]
        flight.timeline.mark_first("prefill_sent", now)
        flight.heard_s = now

    def prefill_finished(self, request_id: str, index: int, cached_tokens: int, now: float) -> list[Command]:
        """P answered."""
        flight = self._flights[request_id]
        leg = flight.legs[index]
        leg.reached(LegState.FINISHED)
        leg.cached_tokens = min(cached_tokens, leg.prompt_tokens)
        self._release(leg)
        flight.timeline.computed(leg.transfer, now)
        flight.heard_s = now
        return self._dispatch_if_ready(flight)

    def prefill_failed(self, request_id: str, index: int, now: float) -> list[Command]:
        """P refused, reset or vanished: another P, unless D is already at work; without one D computes the prompt."""
        flight = self._flights[request_id]
        leg = flight.legs[index]
        self._release(leg)
        leg.state = LegState.FAILED
        flight.timeline.lost(leg.transfer)
        order = None if flight.dispatched else self._assign(flight, leg, now)
        if order is not None:
            return [SendPrefill(request_id=request_id, order=order)]
        return self._dispatch_if_ready(flight)

    def _release(self, leg: PromptLeg) -> None:
        if leg.reservation is not None:
            self.loads.release_prefill(leg.reservation)
            leg.reservation = None

    def transfer_event(self, event: TransferEvent, now: float) -> list[Command]:
        """A store relays a milestone. Late and unknown ones are counted and change nothing else."""
        timeline = self.ledger.of_transfer(event.transfer)
        if timeline is None:
            self.unknown_transfers += 1
            return []
        timeline.note(event, now)
        flight = self._flights.get(timeline.request_id)
        leg = flight.leg_of(event.transfer) if flight else None
        if flight is None or leg is None:
            return []
        flight.heard_s = now
        if event.stage in _LEG_STATES:
            leg.reached(_LEG_STATES[event.stage])
        elif event.stage is Stage.FAILED:
            leg.transfer_over = True
        return self._dispatch_if_ready(flight)

    def _dispatch_if_ready(self, flight: Flight) -> list[Command]:
        return self._dispatch(flight) if flight.ready_for_decode else []

    def _dispatch(self, flight: Flight) -> list[Command]:
        if flight.dispatched:
            return []
        flight.dispatched = True
        return [DispatchDecode(request_id=flight.request_id)]

    # ------------------------------------------------------------ D leg

    def decode_order(self, request_id: str, now: float) -> DecodeOrder:
        """Where the D leg goes now."""
        flight = self._flights[request_id]
        flight.timeline.mark("decode_sent", now)
        member = self.fleet.workers.get(flight.decode.worker)
        if member is None:
            raise Overloaded(f"worker {flight.decode.worker} is gone; retry", RETRY_AFTER_S)
        # Pages went to the store of the D that was chosen first; elsewhere the transfers mean nothing.
        near = member.info.store == flight.aimed_at.store
        return DecodeOrder(
            worker=member.info.name,
            url=member.info.url,
            transfers=flight.transfers() if near else (),
            home=self._home(flight, member.info, now),
        )

    def _home(self, flight: Flight, decode: WorkerInfo, now: float) -> str | None:
        prefill = self.fleet.workers.get(flight.timeline.prefill_worker or "")
        way = self.fleet.pair(decode, prefill.info, now) if prefill else None
        return way.push_to if isinstance(way, Handoff) else None

    def decode_refused(self, request_id: str, now: float) -> bool:
        """D failed before its first byte reached the client; False when no other D is left."""
        flight = self._flights[request_id]
        pick = self._chooser.decode(flight.ask, flight.tried_decode, now)
        if pick is None:
            return False
        self.loads.release_decode(flight.decode)
        self.loads.reserve_decode(pick.reservation)
        flight.decode = pick.reservation
        flight.tried_decode.add(pick.worker.name)
        flight.timeline.decode_worker = pick.worker.name
        flight.timeline.decide("decode", pick.choice)
        return True

    def first_token(self, request_id: str, now: float) -> None:
        self._flights[request_id].timeline.mark_first("first_token", now)

    def cached_tokens(self, request_id: str) -> int | None:
        """What the answer's usage says was cached; None: D's own count is right."""
        return self._flights[request_id].cached_tokens

    def finish(self, request_id: str, *, status: int, output_tokens: int, now: float) -> Timeline:
        """The request is over, however it ended: everything it reserved is given back."""
        flight = self._flights.pop(request_id)
        for leg in flight.legs:
            self._release(leg)
        self.loads.release_decode(flight.decode)
        timeline = flight.timeline
        timeline.status, timeline.output_tokens = status, output_tokens
        timeline.cached_tokens = flight.cached_tokens
        timeline.mark("finished", now)
        return timeline

    def check_invariants(self) -> None:
        """Raise AssertionError unless what is reserved is exactly what the flights hold."""
        flights = self._flights.values()
        prefills = [reservation for flight in flights for reservation in flight.prefill_reservations()]
        self.loads.check(prefills, [flight.decode for flight in flights])
