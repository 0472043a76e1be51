"""Decides when a worker that writes nothing for a request counts as lost. It must never give a worker up when no other
worker could do better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kvrelay.fleet.chooser import Chooser
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import AbandonDecode, AbandonPrefill, Command, Flight, LegState, PromptLeg
from kvrelay.fleet.loads import Loads, PrefillReservation
from kvrelay.fleet.poison_requests import PoisonRequests
from kvrelay.fleet.steps import FORGET_S, Steps
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.loss import LossReason
from kvrelay.policy.recover import Patience


class Silences:
    """Decides which silent workers count as lost, for all requests of one router."""

    def __init__(
        self,
        flights: Mapping[str, Flight],
        fleet: Fleet,
        loads: Loads,
        chooser: Chooser,
        poison_requests: PoisonRequests,
        experience: Experience,
        patience: Patience,
    ) -> None:
        self._flights = flights
        self._fleet = fleet
        self._loads = loads
        self._chooser = chooser
        self._poison_requests = poison_requests
        self._experience = experience
        self._patience = patience
        self._steps = Steps()
        self._unheard_at_s, self._unheard_then = -math.inf, set[str]()
        self.stalls = 0
        """Workers that were found to make no progress although they had work."""

    def __repr__(self) -> str:
        return f"<Silences, {self.stalls} stalls>"

    def unanswered(self, request_id: str, since_s: float, now: float, gap_s: float = 0.0) -> list[Command]:
        """The request has got no piece from its decode worker since ``since_s``: the order to leave it, when it is
        lost.

        ``gap_s``: usual time between two pieces from this worker; 0 before there were three."""
        flight = self._flights.get(request_id)
        if flight is None:
            return []
        worker, own_s = flight.decode.worker, gap_s if flight.writes else 0.0
        self._note_step(worker, own_s, since_s, now)
        if self._is_given_up(worker, since_s, now, own_s):
            return [AbandonDecode(request_id=request_id)]
        forgotten = self._is_forgotten(flight, since_s, now)
        if not forgotten and not self._is_stalled(worker, since_s, now, flight.moves, own_s):
            return []
        if not flight.writes and self._waits_for_pages(flight, now):
            return []
        # A worker may wake up: as long as no other one could go on, this one is waited for, and gets requests.
        if not self._can_move(flight, forgotten, now) and not self._is_hopeless(flight, since_s, now):
            return []
        if not forgotten:
            self._stall(worker, now)
        return [AbandonDecode(request_id=request_id, reason=LossReason.FORGOTTEN if forgotten else LossReason.SILENT)]

    def _note_step(self, worker: str, gap_s: float, since_s: float, now: float) -> None:
        """Note the stream's pace, which is as old as its last piece: a stream that hangs would show it for ever."""
        member = self._fleet.workers.get(worker)
        if member is not None and now - since_s <= FORGET_S:
            self._steps.saw(worker, member.info.incarnation, gap_s, since_s)

    def _is_given_up(self, worker: str, since_s: float, now: float, own_s: float) -> bool:
        """Whether the worker shows no sign of health and the stream is silent as well. A stream that flows is left
        alone, whatever became of the heartbeats."""
        if now - since_s <= self._patience.stream_s or not self._fleet.workers.is_given_up(worker, now):
            return False
        return now - since_s > self._patience.silence_s(self._pace_s(worker, now, own_s))

    def _can_move(self, flight: Flight, forgotten: bool, now: float) -> bool:
        """Whether another decode worker that is heard could go on with the answer. When none is heard, all may be well
        and the fault may be this router's or its network's."""
        # After so long a wait a worker that failed this answer earlier may be well again.
        failed = {flight.decode.worker} if forgotten else self._failed_by(flight)
        unfit = failed | self.unheard(now)
        return not self._decode_workers(now) <= unfit and self._chooser.decode(flight.ask, unfit, now) is not None

    def _is_hopeless(self, flight: Flight, since_s: float, now: float) -> bool:
        worker_silent_s = self._fleet.workers.silent_s(flight.decode.worker, now)
        return self._patience.is_hopeless(_silent_s(flight, since_s, now), worker_silent_s, self._forget_s(flight, now))

    def _is_forgotten(self, flight: Flight, since_s: float, now: float) -> bool:
        if now - since_s <= self._patience.alone_s:  # nearly always
            return False
        makes_progress = self._fleet.workers.silent_s(flight.decode.worker, now) <= self._patience.worker_s
        return makes_progress and _silent_s(flight, since_s, now) > self._forget_s(flight, now)

    def _forget_s(self, flight: Flight, now: float) -> float:
        return self._patience.forget_s(self._due_s(flight, now), flight.moves)

    def _due_s(self, flight: Flight, now: float) -> float:
        """Predicted time to the first token, or to the last one of an answer that is not streamed; 0 once a token
        came."""
        predicted = flight.timeline.predicted
        if flight.writes or flight.resumes or predicted is None:
            return 0.0
        tokens = flight.ask.facts.max_tokens / flight.ask.sequences if flight.ask.in_one_piece else 0.0
        return predicted.ttft_s + tokens * max(predicted.tpot_s, self.step_s(flight.decode.worker, now))

    def _decode_workers(self, now: float) -> set[str]:
        """Usable decode workers of any model. To look at them first is fast: when none is left, a choice for each
        answer would take too long."""
        return {worker.name for worker in self._fleet.workers.usable(now) if worker.role.decodes}

    def unheard(self, now: float) -> set[str]:
        """Workers that missed a heartbeat or two and do not count as dead yet."""
        if self._unheard_at_s != now:
            silent = (member for member in self._fleet.workers if now - member.heard_s > self._patience.worker_s)
            self._unheard_at_s, self._unheard_then = now, {member.info.name for member in silent}
        return self._unheard_then

    def _waits_for_pages(self, flight: Flight, now: float) -> bool:
        """Whether the decode worker is alive and has nothing to compute, since pages of its prompt are still on their
        way."""
        member = self._fleet.workers.get(flight.decode.worker)
        if member is None or member.left or now - member.heard_s > self._patience.worker_s:
            return False
        open_legs = any(leg.reservation is not None or leg.awaits_pages for leg in flight.legs)
        return open_legs and now - flight.heard_s <= self._patience.pages_s

    def _failed_by(self, flight: Flight) -> set[str]:
        """Workers that have failed this answer since its last token, the present decode worker included."""
        return {flight.decode.worker} if flight.writes else self._fleet.workers.still(flight.tried_decode)

    def silent_prefills(self, now: float) -> Iterator[Command]:
        """Orders to leave the prefill legs whose worker makes no progress, or only with other prompts. A worker whose
        heartbeats carry no progress is judged by its lease alone."""
        for flight in self._flights.values():
            for leg in flight.legs:
                held, silent_s = leg.reservation, now - leg.heard_s
                if held is None or leg.state is LegState.HELD or silent_s <= self._patience.stream_s:  # nearly always
                    continue
                member = self._fleet.workers.get(held.worker)
                if member is None or member.progress is None:
                    continue
                if self._is_stalled(held.worker, leg.heard_s, now):
                    self._stall(held.worker, now)
                    self._poison_requests.prefill_lost(leg, LossReason.SILENT, now)
                elif silent_s <= self._patience.forget_s(held.due_s) or not self._is_lost_among_others(leg, held):
                    continue
                yield AbandonPrefill(request_id=flight.request_id, index=leg.index)

    def _is_lost_among_others(self, leg: PromptLeg, held: PrefillReservation) -> bool:
        """Whether the worker makes progress with other prompts only. A worker reports nothing of a prompt between its
        start and its last chunk, so a prompt that is alone there may be the one that it computes."""
        if self._loads.prompts(held.worker) < 2:
            return False
        return leg.begun_s is None or self._loads.is_passed_over(held)

    def _is_stalled(self, worker: str, since_s: float, now: float, moves: int = 0, own_s: float = 0.0) -> bool:
        """Whether stream and worker have both been silent for too long. ``own_s``: the stream's own pace; 0: it has
        none."""
        if now - since_s <= self._patience.stream_s:  # nearly always
            return False
        silent_s = self._fleet.workers.silent_s(worker, now)
        if own_s:  # it flowed; where the health check fails as well, the API server hangs, whatever its engine does
            silent_s = max(silent_s, self._fleet.workers.unwell_s(worker, now))
        return self._patience.is_over(now - since_s, silent_s, self._pace_s(worker, now, own_s), moves)

    def silence_s(self, worker: str, now: float, gap_s: float = 0.0) -> float:
        """Longest silence of a stream of ``worker``, which shows no progress, before the answer goes on elsewhere.

        ``gap_s``: usual time between two pieces of the stream; 0 before there were three.
        """
        return self._patience.silence_s(self._pace_s(worker, now, gap_s))

    def _pace_s(self, worker: str, now: float, own_s: float) -> float:
        """Step time of a stream whose own pace is ``own_s``; 0: it has none, and that of the worker's other streams
        counts, which is less certain. Sequences may have joined the batch since the last piece."""
        return max(own_s, self._predicted_s(worker)) if own_s else self.step_s(worker, now)

    def step_s(self, worker: str, now: float) -> float:
        """Present step time of ``worker``: predicted, or measured by its streams if that is longer; 0: unknown."""
        member = self._fleet.workers.get(worker)
        if member is None:
            return 0.0
        return max(self._predicted_s(worker), self._steps.seconds(worker, member.info.incarnation, now))

    def _predicted_s(self, worker: str) -> float:
        """Predicted time of one step with all sequences of the worker."""
        return self._experience.step(worker).seconds(1.0, self._loads.sequences[worker], self._loads.kv_tokens[worker])

    def _stall(self, worker: str, now: float) -> None:
        member = self._fleet.workers.get(worker)
        if member is not None and member.stalled_s is None:
            self.stalls += 1
            self._fleet.workers.stall(worker, now)


def _silent_s(flight: Flight, since_s: float, now: float) -> float:
    """Time in which D could have written a token. ``since_s``: when it was asked, or wrote its last one."""
    return now - (since_s if flight.writes else max(since_s, flight.heard_s))
