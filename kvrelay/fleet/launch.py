"""Turns picks into flights: reserves, remembers, and writes the orders. It must never pick."""

from __future__ import annotations

from kvrelay.fleet.chooser import Chooser, Pick, longest_prompt
from kvrelay.fleet.flight import Ask, Flight, Plan, PrefillOrder, PromptLeg
from kvrelay.fleet.ground import Ground
from kvrelay.fleet.ledger import Ledger, Timeline
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.outcomes import Outcomes
from kvrelay.policy.route import Path


class Launcher:
    """Everything that a pick changes is changed here, before anybody can await."""

    def __init__(self, chooser: Chooser, loads: Loads, ledger: Ledger, outcomes: Outcomes) -> None:
        self._chooser = chooser
        self._loads = loads
        self._ledger = ledger
        self._outcomes = outcomes

    def __repr__(self) -> str:
        return f"<Launcher onto {self._loads!r}>"

    def start(self, ask: Ask, pick: Pick, ground: Ground, now: float) -> tuple[Flight, Plan]:
        """A new request goes where ``pick`` says."""
        flight = self._open(ask, pick, now)
        orders = self._assign_all(flight, pick, now) if pick.prefill is not None else ()
        reason = "" if orders else self._chooser.why_local(ask, pick.decode, ground)
        flight.path = Path.REMOTE_PREFILL if orders else Path.LOCAL
        flight.dispatched = not orders
        flight.timeline.path, flight.timeline.local_reason = flight.path.value, reason
        flight.timeline.mark("routed", now)
        return flight, Plan(path=flight.path, local_reason=reason, prefills=orders)

    def never_started(self, ask: Ask, *, status: int, now: float) -> Timeline:
        """A request ended while it waited."""
        timeline = self._timeline(ask)
        timeline.path, timeline.status = "none", status
        timeline.mark("finished", now)
        self._ledger.open(timeline)
        return timeline

    def _timeline(self, ask: Ask) -> Timeline:
        facts = ask.facts
        timeline = Timeline(facts.request_id, ask.tenant, ask.received_s, prompt_tokens=sum(facts.prompt_tokens))
        timeline.mark("tokenised", ask.tokenised_s if ask.tokenised_s is not None else ask.received_s)
        return timeline

    def _open(self, ask: Ask, pick: Pick, now: float) -> Flight:
        timeline = self._timeline(ask)
        timeline.decode_worker = pick.decode.name
        timeline.decide("request", pick.decision)
        reservation = pick.decode_reservation(ask)
        flight = Flight(ask=ask, timeline=timeline, decode=reservation, aimed_at=pick.decode, heard_s=now)
        flight.tried_decode.add(pick.decode.name)
        self._loads.reserve_decode(reservation, now)
        self._outcomes.decode_sent(pick.decode.name)
        self._ledger.open(timeline)
        return flight

    def move(self, flight: Flight, pick: Pick, now: float) -> None:
        """The request's answer is to come from another D."""
        self._loads.release_decode(flight.decode, now)
        flight.decode = pick.decode_reservation(flight.ask)
        self._loads.reserve_decode(flight.decode, now)
        self._outcomes.decode_sent(pick.decode.name)
        flight.tried_decode.add(pick.decode.name)
        flight.timeline.decode_worker = pick.decode.name
        flight.timeline.decide("decode", pick.decision)

    def _assign_all(self, flight: Flight, pick: Pick, now: float) -> tuple[PrefillOrder, ...]:
        """A P for every prompt; that of the longest was chosen together with D."""
        facts, first = flight.ask.facts, longest_prompt(flight.ask)
        names = facts.page_names or ({},) * len(facts.prompt_tokens)
        for index, (tokens, pages) in enumerate(zip(facts.prompt_tokens, names, strict=True)):
            flight.legs.append(PromptLeg(index=index, prompt_tokens=tokens, names=pages))
        orders = {first: self._send(flight, flight.legs[first], pick, now)}
        for leg in flight.legs:
            if leg.index != first and (order := self.assign(flight, leg, now)) is not None:
                orders[leg.index] = order
        return tuple(orders[index] for index in sorted(orders))

    def assign(self, flight: Flight, leg: PromptLeg, now: float) -> PrefillOrder | None:
        """Choose and reserve a P for ``leg`` that was not tried yet."""
        pick = self._chooser.prefill(flight.ask, leg, flight.aimed_at, now)
        if pick is None:
            return None
        flight.timeline.decide("prefill", pick.decision)
        return self._send(flight, leg, pick, now)

    def _send(self, flight: Flight, leg: PromptLeg, pick: Pick, now: float) -> PrefillOrder:
        assert pick.prefill is not None, "a local pick sends no prompt"
        assert pick.handoff is not None, "only pairs are chosen"
        attempt = len(leg.tried)
        reservation = self._chooser.prefill_reservation(leg, pick, f"{flight.request_id}/{leg.index}/{attempt}")
        self._outcomes.prefill_sent(leg, reservation, pick.prefill, now)
        self._loads.reserve_prefill(reservation, now)
        leg.send(reservation)
        leg.page_dtype = pick.prefill.engine.fingerprint.format.dtype
        self._ledger.own(flight.request_id, leg.transfer, leg.prompt_tokens, attempt)
        flight.timeline.prefill_worker = pick.prefill.name
        return PrefillOrder(
            index=leg.index,
            worker=pick.prefill.name,
            url=pick.prefill.url,
            transfer=leg.transfer,
            push_to=pick.handoff.push_to,
        )
