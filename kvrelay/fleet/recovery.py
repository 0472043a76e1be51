"""Answers that lost their decode worker: when that is so, where they go on, and whose turn it is. It must never keep
one waiting that nobody will write on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from kvrelay.errors import Harmful
from kvrelay.fleet.chooser import Chooser
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import (
    AbandonDecode,
    AbandonPrefill,
    Ask,
    Command,
    Flight,
    LegState,
    Plan,
    Refuse,
    Rest,
    Start,
    Waits,
)
from kvrelay.fleet.launch import Launcher
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.lost_answer import LostAnswer
from kvrelay.fleet.outcomes import Outcomes
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.prefix_waits import PrefixWaits
from kvrelay.fleet.resumption import Resumption
from kvrelay.fleet.steps import Steps
from kvrelay.fleet.suspects import Suspects
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.policy.cost import Item
from kvrelay.policy.recover import MAX_RESUMES, Manner, Pace, Patience, may_replay

FORGOTTEN = "forgotten"
"""Why an answer leaves a worker that writes others and not this one."""
CHEAP_S = 0.05
"""What is loaded rather than computed need not wait for its turn: it is no more than a step or two of its worker."""


class Recovery:
    """Of all requests of one router."""

    def __init__(
        self,
        flights: Mapping[str, Flight],
        fleet: Fleet,
        loads: Loads,
        chooser: Chooser,
        launcher: Launcher,
        outcomes: Outcomes,
        experience: Experience,
        waits: PrefixWaits,
        suspects: Suspects,
        patience: Patience,
    ) -> None:
        self._flights = flights
        self._fleet = fleet
        self._loads = loads
        self._chooser = chooser
        self._launcher = launcher
        self._outcomes = outcomes
        self._experience = experience
        self._waits = waits
        self._suspects = suspects
        self._patience = patience
        self._pace = Pace()
        self._steps = Steps()
        self._waiting: dict[str, LostAnswer] = {}
        self._unheard_at_s, self._unheard_then = -math.inf, set[str]()
        self.stalls = 0
        """Workers found to make no progress with what they had to do."""

    def __repr__(self) -> str:
        return f"<Recovery {len(self._waiting)} waiting, {self.stalls} stalls>"

    def __len__(self) -> int:
        return len(self._waiting)

    # ------------------------------------------------------------ is it lost?

    def unanswered(self, request_id: str, since_s: float, now: float, gap_s: float = 0.0) -> list[Command]:
        """The request waits for a word of its D since ``since_s``: whether somebody else should write.

        ``gap_s`` usually lay between two words of it before, if they were of this D; else 0.
        """
        flight = self._flights.get(request_id)
        if flight is None:
            return []
        worker, own_s = flight.decode.worker, gap_s if flight.writes else 0.0
        self._note_step(worker, own_s, now)
        forgotten = self._is_forgotten(flight, since_s, now, own_s)
        if not forgotten and not self._is_stalled(worker, since_s, now, self._moves(flight), own_s):
            return []
        if not flight.writes and self._waits_for_pages(flight, now):
            return []
        # A worker may well wake up: as long as nobody else could write, it is waited for, and gets work. Of others that
        # are not heard either no more can be said: all of them may be well, and this router or its network is not.
        # After so long a wait whoever failed it earlier may be well again.
        failed = {worker} if forgotten else self._failed_by(flight)
        unfit = failed | self._unheard(now)
        if self._writers(now) <= unfit or self._chooser.decode(flight.ask, unfit, now) is None:
            return []
        if not forgotten:
            self._stall(worker, now)
        return [AbandonDecode(request_id=request_id, reason=FORGOTTEN if forgotten else "silent")]

    def _note_step(self, worker: str, gap_s: float, now: float) -> None:
        member = self._fleet.workers.get(worker)
        if member is not None:
            self._steps.saw(worker, member.info.incarnation, gap_s, now)

    def _is_forgotten(self, flight: Flight, since_s: float, now: float, own_s: float) -> bool:
        is_begun = flight.writes or flight.resumes > 0
        if not is_begun or now - since_s <= self._patience.alone_s:  # nearly always
            return False
        worker = flight.decode.worker
        makes_progress = self._fleet.workers.silent_s(worker, now) <= self._patience.worker_s
        step_s, moves = own_s or self._step_s(worker, now), self._moves(flight)
        return makes_progress and self._patience.is_forgotten(now - since_s, step_s, moves)

    def _moves(self, flight: Flight) -> int:
        """How many workers had this answer since its last word, and did not write it."""
        return 0 if flight.writes else len(flight.tried_decode) - 1

    def _writers(self, now: float) -> set[str]:
        """Usable ones of any model. Where nobody is left to go to, to choose for each answer takes too long."""
        return {worker.name for worker in self._fleet.workers.usable(now) if worker.role.decodes}

    def _unheard(self, now: float) -> set[str]:
        """Workers that missed a heartbeat or two: alive, as far as anybody knows."""
        if self._unheard_at_s != now:
            silent = (member for member in self._fleet.workers if now - member.heard_s > self._patience.worker_s)
            self._unheard_at_s, self._unheard_then = now, {member.info.name for member in silent}
        return self._unheard_then

    def _waits_for_pages(self, flight: Flight, now: float) -> bool:
        """D says that it lives, and has nothing to step with: pages of its prompt are still on their way."""
        member = self._fleet.workers.get(flight.decode.worker)
        if member is None or member.left or now - member.heard_s > self._patience.worker_s:
            return False
        open_legs = any(leg.reservation is not None or leg.awaits_pages for leg in flight.legs)
        return open_legs and now - flight.heard_s <= self._patience.pages_s

    def _failed_by(self, flight: Flight) -> set[str]:
        """Who has failed this answer since it was last written on, the present D included."""
        return {flight.decode.worker} if flight.writes else flight.tried_decode

    def silent_prefills(self, now: float) -> Iterator[Command]:
        """P legs whose worker makes no progress: another computes their prompts. Who tells of none has its lease."""
        for flight in self._flights.values():
            for leg in flight.legs:
                held = leg.reservation
                if held is None or leg.state is LegState.HELD or not self._is_stalled(held.worker, flight.heard_s, now):
                    continue
                member = self._fleet.workers.get(held.worker)
                if member is not None and member.progress is not None:
                    self._stall(held.worker, now)
                    self._suspects.prefill_lost(leg, "silent", now)
                    yield AbandonPrefill(request_id=flight.request_id, index=leg.index)

    def _is_stalled(self, worker: str, since_s: float, now: float, moves: int = 0, own_s: float = 0.0) -> bool:
        """``own_s``: the pace of the stream itself, if it has one. What others or the past tell is less certain."""
        if now - since_s <= self._patience.stream_s:  # nearly always
            return False
        silent_s = self._fleet.workers.silent_s(worker, now)
        return self._patience.is_over(now - since_s, silent_s, own_s or self._step_s(worker, now), moves)

    def silence_s(self, worker: str, now: float, gap_s: float = 0.0) -> float:
        """For how long a request hears nothing of ``worker``, which shows no life, until another one writes.

        ``gap_s`` usually lay between two words of it; 0: there were no two.
        """
        return self._patience.silence_s(gap_s or self._step_s(worker, now))

    def _step_s(self, worker: str, now: float) -> float:
        member = self._fleet.workers.get(worker)
        if member is None:
            return 0.0
        sequences, kv_tokens = self._loads.sequences[worker], self._loads.kv_tokens[worker]
        predicted_s = self._experience.step(worker).seconds(1.0, sequences, kv_tokens)
        return max(predicted_s, self._steps.seconds(worker, member.info.incarnation, now))

    def _stall(self, worker: str, now: float) -> None:
        member = self._fleet.workers.get(worker)
        if member is not None and member.stalled_s is None:
            self.stalls += 1
            self._fleet.workers.stall(worker, now)

    # ------------------------------------------------------------ where does it go on?

    def writer(self, request_id: str) -> str:
        """Its D: the one that was lost, as long as no other one is found."""
        return self._flights[request_id].decode.worker

    def lost(self, request_id: str, rest: Rest, *, reason: str, now: float) -> Plan | Waits | None:
        """D is gone. A plan to go on by, a wait for one, or None: the answer ends here. Raises ``Harmful``."""
        flight = self._flights[request_id]
        try:
            self._suspects.decode_lost(flight, reason, now)
        except Harmful:
            self._give_back(flight, now, blamed=True)
            self._note(flight, reason, rest, None, now)
            raise
        if reason == FORGOTTEN:
            flight.tried_decode = {flight.decode.worker}
        self._give_back(flight, now, blamed=reason != FORGOTTEN)  # who forgets one writes others
        pick = lost = None
        if rest.ask is not None and flight.resumes <= MAX_RESUMES:
            pick = self._pick(flight, rest.ask, rest, now)
            lost = LostAnswer(flight, rest.ask, rest, _prefill_s(pick) if pick is not None else 0.0, now)
        waits = lost is not None and pick is None and self._may_find_one(lost, self._ready(lost, now), now)
        self._note(flight, reason, rest, pick, now, waits=waits)
        if lost is None or (pick is None and not waits):
            return None
        if pick is not None and self._is_next(lost.ask, pick, now):
            return self._go(flight, lost.ask, pick, now)
        self._waiting[request_id] = lost.found(nobody=waits, now=now)
        return Waits(request_id=request_id)

    def _ready(self, lost: LostAnswer, now: float) -> set[str]:
        return {worker.name for worker in self._chooser.ground(lost.ask.facts.model, now).writers}

    def _may_find_one(self, lost: LostAnswer, ready: set[str], now: float) -> bool:
        """Nobody can write it at the moment, and somebody who was heard lately may soon be able to.

        After a pause of this router or of its network nobody was heard, and everybody lives.
        """
        tried, lease_s = lost.flight.tried_decode, self._patience.leave_s
        return ready <= tried and any(
            member.info.role.decodes
            and member.info.model == lost.ask.facts.model
            and member.info.name not in tried
            and not (member.left or member.draining)
            and now - member.heard_s <= lease_s
            for member in self._fleet.workers
        )

    def _pick(
        self, flight: Flight, ask: Ask, rest: Rest, now: float, unfit: Collection[str] | None = None
    ) -> Pick | None:
        """Where the rest is written; by default not by those who have failed it, nor where a replay takes too long."""
        shunned = set(flight.tried_decode if unfit is None else unfit)
        if rest.manner is Manner.REPLAY:
            shunned |= {
                worker.name
                for worker in self._chooser.ground(ask.facts.model, now).writers
                if not worker.engine.replays or not may_replay(rest.replay_tokens, self._step_s(worker.name, now))
            }
        heard = self._chooser.resume(ask, shunned | self._unheard(now), now)
        return heard if heard is not None else self._chooser.resume(ask, shunned, now)

    def hand_over(self, request_id: str, rest: Rest, *, reason: str, now: float) -> Plan | None:
        """Its D could write on, and is to be left: where the rest begins at once. None: nowhere, and nothing has
        changed."""
        flight = self._flights.get(request_id)
        if flight is None or rest.ask is None or flight.resumes >= MAX_RESUMES:
            return None
        member = self._fleet.workers.get(flight.decode.worker)
        if member is None or not member.draining:  # it is to have work again
            return None
        pick = self._pick(flight, rest.ask, rest, now, {flight.decode.worker})
        if pick is None or not self._is_next(rest.ask, pick, now):
            return None
        self._give_back(flight, now, blamed=False)
        self._note(flight, reason, rest, pick, now)
        return self._go(flight, rest.ask, pick, now)

    def _is_next(self, ask: Ask, pick: Pick, now: float) -> bool:
        cheap = _prefill_s(pick) <= CHEAP_S
        return cheap or (not self._waiting and self._pace.allows(now, self._workers(ask, now)))

    def _give_back(self, flight: Flight, now: float, *, blamed: bool) -> None:
        """What the lost life held but for its place at D, which is kept until the next one."""
        if not flight.resumes:
            flight.cached_before = self._cached(flight)
        if flight.writes or not flight.resumes:
            # Whoever failed it earlier may be well again.
            flight.tried_decode, flight.writes = {flight.decode.worker}, False
        flight.resumes += 1
        self._outcomes.decode_lost(flight, now, blamed=blamed)
        self._waits.drop(flight, now)
        for leg in flight.legs:
            self._outcomes.prefill_failed(leg, now, blamed=False)
            self._waits.failed(leg.transfer)
            self._launcher.release(leg, now)
        self._waits.failed(flight.request_id)

    def _cached(self, flight: Flight) -> int | None:
        """P's own count, or what was predicted: the D that counted is gone."""
        if flight.cached_tokens is not None:
            return flight.cached_tokens
        predicted = flight.timeline.predicted
        return predicted.cached_tokens if predicted is not None else None

    def _note(
        self, flight: Flight, reason: str, rest: Rest, pick: Pick | None, now: float, *, waits: bool = False
    ) -> None:
        goes_on = pick is not None or waits
        chosen = pick.decision.chosen if pick is not None else None
        flight.timeline.lose(
            Resumption(
                reason=reason,
                lost_worker=flight.decode.worker,
                lost_at=round(now - flight.ask.received_s, 6),
                tokens=rest.tokens,
                manner=rest.manner if goes_on else Manner.FAIL,
                outcome="open" if goes_on else "failed",
                worker=pick.decode.name if pick is not None else "",
                cached_tokens=chosen.cached_tokens if chosen is not None else 0,
                prefill_s=round(_prefill_s(pick), 6) if pick is not None else 0.0,
            )
        )

    def _workers(self, ask: Ask, now: float) -> int:
        ground = self._chooser.ground(ask.facts.model, now)
        return max(1, len({worker.name for worker in (*ground.readers, *ground.writers)}))

    def _go(self, flight: Flight, ask: Ask, pick: Pick, now: float) -> Plan:
        self._pace = self._pace.spend(_prefill_s(pick), now, self._workers(ask, now))
        return self._launcher.relaunch(flight, ask, pick, now)

    def turn(self, now: float) -> Iterator[Command]:
        """Time passed, or something was given back: whose turn it is."""
        self._look_for_writers(now)
        for lost in sorted(self._waiting.values(), key=lambda lost: lost.urgency):
            if lost.nobody_since_s is not None and now - lost.nobody_since_s <= self._patience.leave_s:
                continue
            if not self._pace.allows(now, self._workers(lost.ask, now)):
                return
            flight = lost.flight
            del self._waiting[flight.request_id]
            pick = self._pick(flight, lost.ask, lost.rest, now)
            if pick is None:
                reason = "no worker is left that could write the rest of this answer; retry"
                yield Refuse(request_id=flight.request_id, reason=reason, after_s=RETRY_AFTER_S)
            else:
                yield Start(request_id=flight.request_id, plan=self._go(flight, lost.ask, pick, now))

    def _look_for_writers(self, now: float) -> None:
        """Who waits for one at all? Those whose turn is far off, too: each of them is to wait as long as the others."""
        ready: dict[str, set[str]] = {}
        for request_id, lost in self._waiting.items():
            model = lost.ask.facts.model
            if model not in ready:
                ready[model] = self._ready(lost, now)
            nobody = self._may_find_one(lost, ready[model], now)
            if nobody is (lost.nobody_since_s is None):
                self._waiting[request_id] = lost.found(nobody=nobody, now=now)

    def waiting(self, request_id: str) -> LostAnswer | None:
        """An answer that waits for its turn, or for a worker that could write it."""
        return self._waiting.get(request_id)

    @property
    def leave_s(self) -> float:
        """For how long one waits for a worker that could write it."""
        return self._patience.leave_s

    # ------------------------------------------------------------ what became of it

    def resumed(self, request_id: str, pause_s: float, now: float) -> list[Command]:
        """The first piece of the rest is here, ``pause_s`` after the last one before."""
        flight = self._flights[request_id]
        flight.timeline.go_on(flight.decode.worker, pause_s)
        flight.writes = True
        self._outcomes.resumed(flight)
        self._loads.computed(flight.decode, now)
        return self._waits.computed(request_id, now)

    def leave(self, request_id: str) -> None:
        """The request is over."""
        self._waiting.pop(request_id, None)


def _prefill_s(pick: Pick) -> float:
    return dict(pick.decision.chosen.items)[Item.PREFILL]
