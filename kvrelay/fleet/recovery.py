"""Chooses where an answer that lost its decode worker goes on, and in which order such answers do. It must never let an
answer wait when no worker will be able to take it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from kvrelay.errors import Harmful, Overloaded
from kvrelay.fleet.chooser import Chooser
from kvrelay.fleet.decode_availability import DecodeAvailability
from kvrelay.fleet.flight import (
    Ask,
    Command,
    DispatchDecode,
    Flight,
    Plan,
    Queued,
    Refuse,
    Rest,
    Start,
)
from kvrelay.fleet.launch import Launcher
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.lost_answer import LostAnswer
from kvrelay.fleet.outcomes import Outcomes
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.poison_requests import PoisonRequests
from kvrelay.fleet.prefix_waits import PrefixWaits
from kvrelay.fleet.silences import Silences
from kvrelay.fleet.strategies import choice, resumption
from kvrelay.fleet.turns import Turns
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Manner, Patience, may_replay

_CANNOT = "the worker that wrote this answer is gone, and no other one can go on with it; send the request again"
_TOO_OFTEN = "workers were lost too often while they wrote this answer; send the request again"
_NOBODY = "no worker is left that could write the rest of this answer; send the request again"

TURN_EVERY_S = 0.05
"""Shortest time between two looks at the waiting answers. When 2,000 clients hang up at once, 2,000 reservations are
released, and a look at every waiting answer for each of them would take seconds."""


class Recovery:
    """Moves the answers of one router to other decode workers when theirs are lost."""

    def __init__(
        self,
        flights: Mapping[str, Flight],
        fleet: Fleet,
        loads: Loads,
        chooser: Chooser,
        poison_requests: PoisonRequests,
        launcher: Launcher,
        outcomes: Outcomes,
        waits: PrefixWaits,
        silences: Silences,
        patience: Patience,
    ) -> None:
        self._flights = flights
        self._fleet = fleet
        self._loads = loads
        self._chooser = chooser
        self._poison_requests = poison_requests
        self._launcher = launcher
        self._outcomes = outcomes
        self._waits = waits
        self._silences = silences
        self._patience = patience
        self._turned_s = -math.inf
        self._turns = Turns()

    def __repr__(self) -> str:
        return f"<Recovery {self._turns!r}>"

    def __len__(self) -> int:
        """Answers that wait for their turn or for a decode worker."""
        return len(self._turns)

    # ------------------------------------------------------------ where does it go on?

    def decode_worker(self, request_id: str) -> str:
        """The request's decode worker: the lost one until another one is chosen."""
        return self._flights[request_id].decode.worker

    def lost(self, request_id: str, rest: Rest, *, reason: LossReason, now: float) -> Plan | Queued:
        """The decode worker was lost after it wrote ``rest.tokens`` tokens. Returns a plan to go on by, or ``Queued``.
        Raises ``Harmful`` or ``Overloaded``, with what the client is told, when the answer ends here."""
        flight = self._flights[request_id]
        flight.losses = flight.losses.another(rest.tokens)
        try:
            self._poison_requests.decode_lost(flight, reason, now)
        except (Harmful, Overloaded):
            self._give_back(flight, now, blamed=True)
            flight.timeline.lose(resumption(flight, reason, rest, now, goes_on=False))
            raise
        if reason is LossReason.FORGOTTEN:
            flight.tried_decode = _present(flight)
        # A worker that forgets one request answers others, and one that was not asked yet did nothing wrong.
        self._give_back(flight, now, blamed=reason is not LossReason.FORGOTTEN and self._loads.is_asked(flight.decode))
        if rest.ask is None or flight.losses.are_too_many:
            flight.timeline.lose(resumption(flight, reason, rest, now, goes_on=False))
            raise Overloaded(_CANNOT if rest.ask is None else _TOO_OFTEN, RETRY_AFTER_S)
        pick = self._pick(flight, rest.ask, rest, now)
        lost = LostAnswer(flight, rest.ask, rest, pick.prefill_s if pick is not None else 0.0, now)
        waits = pick is None and self._availability(lost, now).only_soon(lost, self._tried(flight))
        goes_on = pick is not None or waits
        flight.timeline.lose(resumption(flight, reason, rest, now, goes_on=goes_on))
        if not goes_on:
            raise Overloaded(_NOBODY, RETRY_AFTER_S)
        if pick is not None and self._is_next(lost.ask, pick, now):
            return self._go(flight, lost.ask, pick, now)
        self._turns.wait(lost.found(nobody=waits, now=now))
        return Queued(request_id=request_id)

    def refused(self, request_id: str, reason: LossReason | None, now: float) -> DispatchDecode | Queued | None:
        """The decode worker was lost before it wrote a token. Returns the order to ask another one, ``Queued``, or None
        when no decode worker is left."""
        flight = self._flights[request_id]
        if reason is LossReason.FORGOTTEN:
            flight.losses = flight.losses.another(0)
            if flight.losses.are_too_many:
                return None
            flight.tried_decode = _present(flight)
        pick = self._chooser.decode(flight.ask, self._tried(flight), now)
        rest = Rest(ask=flight.ask, tokens=0, manner=Manner.RESTART)
        lost = LostAnswer(flight, flight.ask, rest, pick.prefill_s if pick is not None else 0.0, now)
        if pick is None and not self._availability(lost, now).only_soon(lost, self._tried(flight)):
            return None
        if pick is not None and self._is_next(flight.ask, pick, now):
            return self._move(flight, pick, now)
        self._turns.wait(lost.found(nobody=pick is None, now=now))
        return Queued(request_id=request_id)

    def _move(self, flight: Flight, pick: Pick, now: float) -> DispatchDecode:
        """Ask the decode worker of ``pick``. KV that prefill workers have computed or still compute is used where the
        new worker can reach it; the rest is computed again."""
        self._spend(flight.ask, pick, now)
        self._launcher.move(flight, pick, now)
        return DispatchDecode(request_id=flight.request_id)

    def _availability(self, lost: LostAnswer, now: float) -> DecodeAvailability:
        topology = self._chooser.topology(lost.model, now)
        return DecodeAvailability.of(lost.model, topology, self._fleet.workers, self._patience.leave_s, now)

    def _tried(self, flight: Flight) -> set[str]:
        """Workers that have failed this request and were not restarted since."""
        return self._fleet.workers.still(flight.tried_decode)

    def _pick(
        self, flight: Flight, ask: Ask, rest: Rest, now: float, unfit: Collection[str] | None = None
    ) -> Pick | None:
        """Workers that can go on with the rest. Workers in ``unfit`` are left out, by default those that have failed
        the request, and so are workers on which a replay would take too long."""
        shunned = set(self._tried(flight) if unfit is None else unfit)
        if rest.manner is Manner.REPLAY:
            shunned |= {
                worker.name
                for worker in self._chooser.topology(ask.facts.model, now).decode_workers
                if not worker.engine.replays
                or not may_replay(rest.replay_tokens, self._silences.step_s(worker.name, now))
            }
        heard = self._chooser.resume(ask, shunned | self._silences.unheard(now), now)
        return heard if heard is not None else self._chooser.resume(ask, shunned, now)

    def hand_over(self, request_id: str, rest: Rest, *, reason: LossReason, now: float) -> Plan | None:
        """Move an answer off a draining decode worker that could still write it. Returns the plan for the rest, or None
        when no other worker can begin at once: nothing has changed then."""
        flight = self._flights.get(request_id)
        if flight is None or rest.ask is None:
            return None
        member = self._fleet.workers.get(flight.decode.worker)
        if member is None or not member.draining:  # it is to have work again
            return None
        pick = self._pick(flight, rest.ask, rest, now, {flight.decode.worker})
        if pick is None or not self._is_next(rest.ask, pick, now):
            return None
        self._give_back(flight, now, blamed=False)
        flight.timeline.lose(resumption(flight, reason, rest, now, goes_on=True))
        return self._go(flight, rest.ask, pick, now)

    def _is_next(self, ask: Ask, pick: Pick, now: float) -> bool:
        model = ask.facts.model
        return self._turns.may_pass(model, pick.prefill_s, now, self._workers(model, now))

    def _give_back(self, flight: Flight, now: float, *, blamed: bool) -> None:
        """Release what the request holds, but for its reservation on the lost decode worker: that is kept until another
        one is chosen. ``blamed``: the loss counts as a failure of the worker."""
        if not flight.resumes:
            flight.cached_before = self._cached(flight)
        if flight.writes or not flight.resumes:
            # A worker that failed this request earlier may be well again.
            flight.tried_decode, flight.writes = _present(flight), False
        flight.resumes += 1
        self._outcomes.decode_lost(flight, now, blamed=blamed)
        self._waits.drop(flight, now)
        for leg in flight.legs:
            self._outcomes.prefill_failed(leg, now, blamed=False)
            self._waits.failed(leg.transfer)
            self._launcher.release(leg, now)
        self._waits.failed(flight.request_id)

    def _cached(self, flight: Flight) -> int | None:
        """Cached prompt tokens by P's own count, or else as predicted: the decode worker that counted is gone."""
        if flight.cached_tokens is not None:
            return flight.cached_tokens
        predicted = flight.timeline.predicted
        return predicted.cached_tokens if predicted is not None else None

    def _workers(self, model: str, now: float) -> int:
        topology = self._chooser.topology(model, now)
        return max(1, len({worker.name for worker in (*topology.prefill_workers, *topology.decode_workers)}))

    def _spend(self, ask: Ask, pick: Pick, now: float) -> None:
        model = ask.facts.model
        self._turns.spend(model, pick.prefill_s, now, self._workers(model, now))

    def _go(self, flight: Flight, ask: Ask, pick: Pick, now: float) -> Plan:
        lost = self._fleet.workers.get(flight.decode.worker)
        flight.timeline.goes_on_by(choice(pick, lost.info.store if lost is not None else ""))
        self._spend(ask, pick, now)
        return self._launcher.relaunch(flight, ask, pick, now)

    def turn(self, now: float) -> Iterator[Command]:
        """Time passed, or a reservation was released: start the waiting answers whose turn has come. Does nothing
        within ``TURN_EVERY_S`` of the last call that did."""
        if now - self._turned_s < TURN_EVERY_S:
            return
        self._turned_s = now
        self._look_for_decode_workers(now)
        for model in self._turns.models():
            yield from self._turn_of(model, now)
        self._turns.expire(now)

    def _turn_of(self, model: str, now: float) -> Iterator[Command]:
        workers = self._workers(model, now)
        for lost in self._turns.ordered(model):
            if lost.nobody_since_s is not None and now - lost.nobody_since_s <= self._patience.leave_s:
                continue
            if not self._turns.allows(model, now, workers):
                return
            self._turns.leave(lost.flight.request_id)
            yield self._next(lost, now)

    def _next(self, lost: LostAnswer, now: float) -> Command:
        """Start this answer, or end it when no worker can take it."""
        flight = lost.flight
        if not flight.resumes:  # nothing was written
            pick = self._chooser.decode(flight.ask, self._tried(flight), now)
            if pick is None:
                return self._nobody(flight, "no worker could answer this request; retry")
            return self._move(flight, pick, now)
        pick = self._pick(flight, lost.ask, lost.rest, now)
        if pick is None:
            return self._nobody(flight, _NOBODY)
        return Start(request_id=flight.request_id, plan=self._go(flight, lost.ask, pick, now))

    def _nobody(self, flight: Flight, reason: str) -> Refuse:
        return Refuse(request_id=flight.request_id, reason=reason, after_s=RETRY_AFTER_S)

    def _look_for_decode_workers(self, now: float) -> None:
        """Note for each waiting answer since when no decode worker can take it. Answers whose turn is far off are
        looked at too, so that all of them wait equally long for a worker."""
        availability: dict[str, DecodeAvailability] = {}
        for lost in self._turns:
            if lost.model not in availability:
                availability[lost.model] = self._availability(lost, now)
            nobody = availability[lost.model].only_soon(lost, self._tried(lost.flight))
            if nobody is (lost.nobody_since_s is None):
                self._turns.wait(lost.found(nobody=nobody, now=now))

    def waiting(self, request_id: str) -> LostAnswer | None:
        """The request's answer while it waits for its turn or for a decode worker; None when it does not wait."""
        return self._turns.get(request_id)

    @property
    def leave_s(self) -> float:
        """Longest time that an answer waits for a decode worker that can take it, in seconds."""
        return self._patience.leave_s

    # ------------------------------------------------------------ what became of it

    def resumed(self, request_id: str, pause_s: float, now: float) -> list[Command]:
        """The first token of the rest came, ``pause_s`` seconds after the last one before the loss."""
        flight = self._flights[request_id]
        flight.timeline.go_on(flight.decode.worker, pause_s)
        flight.writes, flight.moves = True, 0
        self._outcomes.resumed(flight)
        self._loads.computed(flight.decode, now)
        return self._waits.computed(request_id, now)

    def leave(self, request_id: str) -> None:
        """The request is over and waits no more."""
        self._turns.leave(request_id)


def _present(flight: Flight) -> dict[str, str]:
    """The present decode worker alone, of all workers that the request has tried, with its incarnation."""
    return {flight.decode.worker: flight.tried_decode[flight.decode.worker]}
