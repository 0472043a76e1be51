"""What every outcome of a leg tells: of the worker's health, of what it holds now, of how long things take. It must
never change what is reserved; the brain does."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.fleet.actual import actual
from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.calibration import Calibration
from kvrelay.fleet.flight import Flight, PromptLeg
from kvrelay.fleet.holdings import Holdings
from kvrelay.fleet.lessons import Lessons
from kvrelay.fleet.workers import Fleet
from kvrelay.types import CLIENT_CLOSED, PromptNames, WorkerInfo

BROKEN_STREAM = 502
"""The only 5xx that blames the D of a request that is over: refusals of others were counted when they came."""


class Outcomes:
    """Tells each of them."""

    def __init__(self, fleet: Fleet, holdings: Holdings, lessons: Lessons) -> None:
        self._fleet = fleet
        self._holdings = holdings
        self._lessons = lessons
        self.breakers = Breakers()
        self.calibration = Calibration()

    def __repr__(self) -> str:
        return f"<Outcomes {self.breakers!r}, {self.calibration!r}>"

    def prefill_chosen(self, worker: str, transfer: str) -> None:
        """A prompt is to go to ``worker``."""
        self.breakers.sent(worker, transfer)
        self._lessons.prefill_chosen(worker)

    def prefill_sent(self, leg: PromptLeg, now: float, *, alone: bool) -> None:
        """It goes there now; ``alone``: no other prompt is there."""
        self._lessons.sent(leg, now, alone=alone)

    def prefill_finished(self, leg: PromptLeg, now: float) -> None:
        """P answered."""
        worker = self._prefiller(leg)
        if worker is None:
            return
        self.breakers.succeeded(worker.name, leg.transfer, leg.sent_s)
        self._lessons.computed(leg, now)
        self._holdings.engine_got(worker, leg.names)
        self._holdings.store_got(worker, leg.names)

    def prefill_failed(self, leg: PromptLeg, now: float, *, blamed: bool) -> None:
        """P refused, reset or vanished; not ``blamed`` when the router called it off or the request was at fault."""
        worker = self._prefiller(leg)
        if worker is not None and blamed:
            self.breakers.failed(worker.name, leg.transfer, now)
        elif worker is not None:
            self.breakers.gave_up(worker.name, leg.transfer, now)

    def prefill_answered(self, worker: str, transfer: str, asked_s: float) -> None:
        """P, asked at ``asked_s``, says that the request is wrong: that is an answer."""
        self.breakers.succeeded(worker, transfer, asked_s)

    def _prefiller(self, leg: PromptLeg) -> WorkerInfo | None:
        member = self._fleet.workers.get(leg.reservation.worker) if leg.reservation is not None else None
        return member.info if member is not None else None

    def decode_sent(self, worker: str, request_id: str) -> None:
        """A request's answer is to come from ``worker``."""
        self.breakers.sent(worker, request_id)
        self._lessons.decode_chosen(worker)

    def decode_asked(self, flight: Flight) -> None:
        """It is asked for it now."""
        self._lessons.asked(flight)

    def decode_refused(self, flight: Flight, now: float) -> None:
        """D failed before its first byte reached the client."""
        self.breakers.failed(flight.decode.worker, flight.request_id, now)

    def decode_lost(self, flight: Flight, now: float, *, blamed: bool) -> None:
        """D does not write on; not ``blamed`` when it was well and only to be left."""
        if blamed:
            self.breakers.failed(flight.decode.worker, flight.request_id, now)
        else:
            self.breakers.gave_up(flight.decode.worker, flight.request_id, now)

    def first_token(self, flight: Flight, now: float) -> None:
        """D writes."""
        self._lessons.first_token(flight, now)
        self._wrote(flight)

    def answered(self, flight: Flight, now: float) -> None:
        """D wrote an answer that came in one piece."""
        self._lessons.answered(flight, now)
        self._wrote(flight)

    def resumed(self, flight: Flight) -> None:
        """Another D writes the rest of an answer."""
        self._wrote(flight)

    def _wrote(self, flight: Flight) -> None:
        self.breakers.succeeded(flight.decode.worker, flight.request_id, flight.asked_s)
        decode = self._fleet.workers.get(flight.decode.worker)
        if decode is not None:
            self._keep(decode.info, flight.ask.facts.page_names)

    def _keep(self, decode: WorkerInfo, prompts: Sequence[PromptNames]) -> None:
        for names in prompts:
            self._holdings.engine_got(decode, names)
            self._holdings.store_got(decode, names)

    def finished(self, flight: Flight, now: float) -> None:
        """The request is over; its timeline has the status."""
        status = flight.timeline.status or 0
        for leg in flight.legs:
            self.prefill_failed(leg, now, blamed=False)
        self._judge_decode(flight, status, now)
        self._lessons.finished(flight, now)
        if status == 200 and flight.went_as_planned:
            self.calibration.add(flight.timeline.decisions[0][1], actual(flight.timeline, flight.ask.sequences))

    def _judge_decode(self, flight: Flight, status: int, now: float) -> None:
        asked = "decode_sent" in flight.timeline.events
        if asked and status == BROKEN_STREAM:
            self.breakers.failed(flight.decode.worker, flight.request_id, now)
        elif asked and status < 500 and status != CLIENT_CLOSED:
            self.breakers.succeeded(flight.decode.worker, flight.request_id, flight.asked_s)
        else:
            self.breakers.gave_up(flight.decode.worker, flight.request_id, now)
