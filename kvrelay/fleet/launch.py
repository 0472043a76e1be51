"""Turns picks into flights: reserves, remembers, and writes the orders. It must never pick."""

from __future__ import annotations

from kvrelay.fleet.chooser import Chooser, longest_prompt
from kvrelay.fleet.flight import Ask, Command, Flight, LegState, Plan, PrefillOrder, PromptLeg, PullPages, SendPrefill
from kvrelay.fleet.holdings import names_for
from kvrelay.fleet.holds import OWN, Ending, Hold
from kvrelay.fleet.ledger import NOT_BEGUN, Ledger, Timeline
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.outcomes import Outcomes
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.prefix_wait import PrefixWait
from kvrelay.fleet.prefixes import Outgoing, Prefixes, PrefixHold
from kvrelay.fleet.topology import Topology
from kvrelay.fleet.ways import Ways
from kvrelay.policy.patience import MOST_HOLDS
from kvrelay.policy.route import Decision, Path
from kvrelay.types import Value


class Assigned(Value, frozen=True, kw_only=True):
    """A prompt has its P. Without an ``order`` it is held back; ``pull`` is what it then waits for, if not another."""

    order: PrefillOrder | None = None
    pull: PullPages | None = None

    def commands(self, request_id: str) -> list[Command]:
        """What the router is to do now."""
        if self.order is not None:
            return [SendPrefill(request_id=request_id, order=self.order)]
        return [self.pull] if self.pull is not None else []


class Launcher:
    """Applies a pick: reserves and orders all that it needs in one step, before any other event."""

    def __init__(
        self, chooser: Chooser, loads: Loads, ledger: Ledger, outcomes: Outcomes, prefixes: Prefixes, ways: Ways
    ) -> None:
        self._chooser = chooser
        self._ways = ways
        self._loads = loads
        self._ledger = ledger
        self._outcomes = outcomes
        self._prefixes = prefixes

    def __repr__(self) -> str:
        return f"<Launcher onto {self._loads!r}>"

    def start(self, ask: Ask, pick: Pick, topology: Topology, now: float) -> tuple[Flight, Plan]:
        """A new request goes where ``pick`` says."""
        flight = self._open(ask, pick, now)
        reason = self._chooser.why_local(ask, pick.decode, topology) if pick.prefill is None else ""
        flight.timeline.mark("routed", now)
        plan = self._lay(flight, pick, reason, now)
        flight.timeline.path, flight.timeline.local_reason = flight.path.value, reason
        return flight, plan

    def relaunch(self, flight: Flight, ask: Ask, pick: Pick, now: float) -> Plan:
        """The rest of an answer whose D was lost goes where ``pick`` says; ``ask`` is of the rest."""
        flight.ask, flight.legs, flight.aimed_at, flight.heard_s = ask, [], pick.decode, now
        self.move(flight, pick, now, about="resume")
        return self._lay(flight, pick, "", now)

    def _lay(self, flight: Flight, pick: Pick, reason: str, now: float) -> Plan:
        """The plan for all prompts: where each is computed, and for which pulls it waits."""
        local = pick.prefill is None
        flight.path = Path.LOCAL if local else Path.REMOTE_PREFILL
        hold = self._stay(flight, pick, now) if local else None
        assigned = [] if local else self._assign_all(flight, pick, now)
        flight.dispatched = local and hold is None
        pulls = [hold.pull] if hold is not None else [each.pull for each in assigned]
        return Plan(
            path=flight.path,
            local_reason=reason,
            prefills=tuple(each.order for each in assigned if each.order is not None),
            pulls=tuple(pull for pull in pulls if pull is not None),
            held=hold is not None,
        )

    def never_started(self, ask: Ask, *, status: int, now: float, decision: Decision | None, refusal: str) -> Timeline:
        """A request was turned away with ``refusal``, or its client left while it waited. ``decision``: what was
        predicted of it."""
        timeline = self._timeline(ask)
        timeline.path, timeline.status, timeline.refusal = NOT_BEGUN, status, refusal
        if decision is not None:
            timeline.decide("request", decision)
        timeline.mark("finished", now)
        self._ledger.keep_unstarted(timeline)
        return timeline

    def _timeline(self, ask: Ask) -> Timeline:
        facts = ask.facts
        timeline = Timeline(facts.request_id, ask.tenant, ask.received_s, prompt_tokens=sum(facts.prompt_tokens))
        timeline.slo = ask.slo
        timeline.mark("tokenised", ask.tokenised_s if ask.tokenised_s is not None else ask.received_s)
        return timeline

    def _open(self, ask: Ask, pick: Pick, now: float) -> Flight:
        timeline = self._timeline(ask)
        timeline.decode_worker = pick.decode.name
        timeline.decide("request", pick.decision)
        reservation = pick.decode_reservation(ask)
        flight = Flight(ask=ask, timeline=timeline, decode=reservation, aimed_at=pick.decode, heard_s=now)
        flight.tried_decode[pick.decode.name] = pick.decode.incarnation
        self._loads.reserve_decode(reservation, now)
        self._outcomes.decode_sent(pick.decode.name, flight.request_id)
        self._ledger.open(timeline)
        return flight

    def move(self, flight: Flight, pick: Pick, now: float, *, about: str = "decode") -> None:
        """The request's answer is to come from another D."""
        flight.moves += 1
        self._loads.release_decode(flight.decode, now)
        flight.decode = pick.decode_reservation(flight.ask)
        self._loads.reserve_decode(flight.decode, now)
        self._outcomes.decode_sent(pick.decode.name, flight.request_id)
        flight.tried_decode[pick.decode.name] = pick.decode.incarnation
        flight.timeline.decode_worker = pick.decode.name
        flight.timeline.decide(about, pick.decision)

    def _stay(self, flight: Flight, pick: Pick, now: float) -> PrefixHold | None:
        """D computes the prompt itself; how it waits before, when it does."""
        facts = flight.ask.facts
        if len(facts.prompt_tokens) > 1 or not facts.page_names:
            return None
        outgoing = Outgoing(
            request_id=flight.request_id,
            index=OWN,
            key=flight.request_id,
            computed_on=pick.decode,
            tokens=facts.prompt_tokens[0],
            names=names_for(pick.decode, facts.page_names[0]),
            stores=(pick.decode.store,),
            option=pick.decision.chosen,
            order=None,
        )
        return self._begin(flight, outgoing, now)

    def _begin(self, flight: Flight, outgoing: Outgoing, now: float) -> PrefixHold | None:
        hold = self._prefixes.begin(outgoing, now)
        if hold is not None:
            option = outgoing.option
            flight.timeline.held(
                PrefixWait(
                    index=outgoing.index,
                    source=option.source.kind,
                    origin=option.source.origin,
                    tokens=option.cached_tokens,
                    predicted_s=hold.hold.predicted_s,
                    since_s=now,
                )
            )
        return hold

    def _assign_all(self, flight: Flight, pick: Pick, now: float) -> list[Assigned]:
        """A P for every prompt; that of the longest was chosen together with D."""
        facts, first = flight.ask.facts, longest_prompt(flight.ask)
        names = facts.page_names or ({},) * len(facts.prompt_tokens)
        for index, (tokens, pages) in enumerate(zip(facts.prompt_tokens, names, strict=True)):
            flight.legs.append(PromptLeg(index=index, prompt_tokens=tokens, names=pages))
        assigned = {first: self._send(flight, flight.legs[first], pick, now)}
        for leg in flight.legs:
            if leg.index != first and (found := self.assign(flight, leg, now)) is not None:
                assigned[leg.index] = found
        return [assigned[index] for index in sorted(assigned)]

    def assign(self, flight: Flight, leg: PromptLeg, now: float, shun: str | None = None) -> Assigned | None:
        """Choose and reserve a P for ``leg`` that was not tried yet and is not the one to ``shun``."""
        may_wait = leg.holds < MOST_HOLDS
        pick = self._chooser.prefill(flight.ask, leg, flight.aimed_at, now, may_wait=may_wait, shun=shun)
        if pick is None:
            return None
        flight.timeline.decide("prefill", pick.decision)
        return self._send(flight, leg, pick, now)

    def resume(self, flight: Flight, hold: Hold, ending: Ending, now: float) -> Assigned | None:
        """A prompt is held back no more: it goes where it was to go, or, without its prefix, where that is best now.

        None: no P is left.
        """
        leg = flight.legs[hold.index]
        if ending is Ending.CAME and hold.order is not None:
            leg.state, leg.sent_s, leg.heard_s = LegState.SENT, now, now
            if leg.reservation is not None:
                self._loads.send(leg.reservation, now)
            self._outcomes.prefill_sent(leg, now, alone=self._loads.prompts(hold.order.worker) == 1)
            return Assigned(order=hold.order)
        self.withdraw(leg, now)
        if ending is Ending.LATE:
            leg.holds = MOST_HOLDS  # it has waited enough
            if (elsewhere := self.assign(flight, leg, now, shun=hold.worker)) is not None:
                return elsewhere
        return self.assign(flight, leg, now)

    def withdraw(self, leg: PromptLeg, now: float) -> None:
        """A prompt that was held back does not go to its P."""
        if leg.reservation is not None:
            self._outcomes.prefill_failed(leg, now, blamed=False)
            leg.tried.discard(leg.reservation.worker)
            self.release(leg, now)
        leg.state = LegState.FAILED

    def computed(self, leg: PromptLeg, now: float) -> None:
        """P has computed a prompt, and what that has reserved there is given back."""
        if leg.reservation is not None:
            self._loads.computed(leg.reservation, now)
        self.release(leg, now)

    def release(self, leg: PromptLeg, now: float) -> None:
        """Give back what a prompt has reserved at its P."""
        if leg.reservation is not None:
            self._loads.release_prefill(leg.reservation, now)
            leg.reservation = None

    def _send(self, flight: Flight, leg: PromptLeg, pick: Pick, now: float) -> Assigned:
        assert pick.prefill is not None, "a local pick sends no prompt"
        assert pick.handoff is not None, "only pairs are chosen"
        attempt = len(leg.tried)
        life = f".{flight.resumes}" if flight.resumes else ""
        transfer = f"{flight.request_id}{life}/{leg.index}/{attempt}"
        reservation = pick.prefill_reservation(leg, transfer)
        alone = not self._loads.prompts(pick.prefill.name)
        self._outcomes.prefill_chosen(pick.prefill.name, transfer)
        self._loads.reserve_prefill(reservation, now)
        leg.send(reservation, now)
        self._ways.sent(transfer, (reservation.source, reservation.target), now)
        leg.page_dtype = pick.prefill.engine.fingerprint.format.dtype
        self._ledger.own(flight.request_id, leg.transfer, leg.prompt_tokens, attempt)
        flight.timeline.prefill_worker = pick.prefill.name
        order = PrefillOrder(
            index=leg.index,
            worker=pick.prefill.name,
            url=pick.prefill.url,
            transfer=leg.transfer,
            push_to=pick.handoff.push_to,
        )
        outgoing = Outgoing(
            request_id=flight.request_id,
            index=leg.index,
            key=leg.transfer,
            computed_on=pick.prefill,
            tokens=leg.prompt_tokens,
            names=names_for(pick.prefill, leg.names),
            stores=(pick.prefill.store, pick.decode.store),
            option=pick.decision.chosen,
            order=order,
        )
        hold = self._begin(flight, outgoing, now)
        if hold is None:
            self._outcomes.prefill_sent(leg, now, alone=alone)
            return Assigned(order=order)
        self._loads.hold(reservation, now)
        leg.state, leg.holds = LegState.HELD, leg.holds + 1
        return Assigned(pull=hold.pull)
