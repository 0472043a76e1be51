"""Limits how many workers one request may crash. The requests that a worker was running share the blame for its crash
equally, also those that notice it some seconds after the first. It must never end a request that a worker has answered
since the crash."""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.errors import Harmful, Overloaded
from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.flight import Flight, PromptLeg
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.admit import RETRY_AFTER_S
from kvrelay.policy.crash_history import SOON_S, CrashHistory
from kvrelay.policy.loss import DEADLY, LossReason

TOGETHER_S = 5.0
"""Losses of one worker that requests report within this time of each other are one crash: each notices by itself."""
MAX_WINDOWS = 1024


class LossWindow(NamedTuple):
    """One crash of a worker, while requests still report that they lost it."""

    requests: int
    """Requests that the worker was running when the first of them reported the loss."""
    told_s: float
    """When a request last reported the loss, on the clock of ``now``."""


class PoisonRequests:
    """Counts the crashes of each request of one router, and rejects requests that crash too many workers."""

    def __init__(self, loads: Loads, fleet: Fleet, breakers: Breakers, *, knows_all: bool) -> None:
        """``knows_all``: no other router has requests at these workers."""
        self._loads = loads
        self._fleet = fleet
        self._breakers = breakers
        self._knows_all = knows_all
        self._windows: dict[str, LossWindow] = {}
        self.ended = 0
        """Requests that were rejected as poison: no other worker was asked."""

    def __repr__(self) -> str:
        return f"<PoisonRequests {self.ended} ended>"

    def decode_lost(self, flight: Flight, reason: LossReason | None, now: float) -> None:
        """The request lost its decode worker, where its reservation is still held. Raises what the client is told when
        no other worker may be asked: ``Harmful``, or ``Overloaded`` where the workers may be at fault."""
        if flight.writes:
            flight.crashes = CrashHistory()
        elif self._is_death(flight.decode.worker, reason, flight.asked_s):
            held = flight.decode
            flight.crashes = self._after_loss(flight.crashes, held.worker, held.sequences, reason, flight.asked_s, now)
            if (error := self.verdict(flight.crashes)) is not None:
                self.ended += isinstance(error, Harmful)
                raise error

    def prefill_lost(self, leg: PromptLeg, reason: LossReason | None, now: float) -> None:
        """The prompt lost its prefill worker, where its reservation is still held."""
        held = leg.reservation
        if held is not None and self._is_death(held.worker, reason, leg.sent_s):
            leg.crashes = self._after_loss(leg.crashes, held.worker, 1, reason, leg.sent_s, now)
            self.ended += isinstance(self.verdict(leg.crashes), Harmful)

    def verdict(self, crashes: CrashHistory) -> Harmful | Overloaded | None:
        """What the client is told when no other worker may be asked; None while one may."""
        if not crashes.is_poison:
            return None
        if crashes.only_failed and all(self._lives(*failed) for failed in crashes.failed):
            # A crash is answered with a failure, too, but these workers live: they may fail at every request.
            return Overloaded("several workers failed at this request and may fail at others; retry", RETRY_AFTER_S)
        return Harmful(_why(crashes))

    def _is_death(self, worker: str, reason: LossReason | None, asked_s: float) -> bool:
        """Whether this loss counts as a crash that the request may have caused."""
        match reason:
            case LossReason.SILENT:
                # A worker without a heartbeat since it was asked may have stopped before. A request that hangs an
                # engine does not stop the worker's heartbeats.
                member = self._fleet.workers.get(worker)
                return member is not None and member.heard_s > asked_s
            case LossReason.FAILED:
                # A worker that was failing already when it was asked would have failed at any request.
                return self._breakers.of(worker).failing_since_s >= asked_s
        return reason in DEADLY

    def _after_loss(
        self, crashes: CrashHistory, worker: str, part: int, reason: LossReason | None, asked_s: float, now: float
    ) -> CrashHistory:
        """The history with one more loss; ``part``: sequences of this request among all that ``worker`` was running."""
        silent_s = self._fleet.workers.silent_s(worker, now) if reason is LossReason.SILENT else 0.0
        if now - silent_s - asked_s > SOON_S:
            return crashes.with_late_loss()
        share = part / self._requests_at(worker, now) if self._knows_all else 0.0
        member = self._fleet.workers.get(worker)
        if reason is LossReason.FAILED and member is not None:
            return crashes.with_failure(share, worker, member.info.incarnation)
        return crashes.with_crash(share)

    def _lives(self, worker: str, incarnation: str) -> bool:
        """Whether this incarnation of ``worker`` is still a healthy member."""
        member = self._fleet.workers.get(worker)
        if member is None or member.info.incarnation != incarnation:
            return False
        return member.healthy and not (member.left or member.cut)

    def _requests_at(self, worker: str, now: float) -> int:
        """Requests that ``worker`` was running when it crashed. Requests that report the loss later find fewer
        there."""
        has = max(1, self._loads.running[worker] + self._loads.prefill_legs[worker])
        window = self._windows.get(worker)
        if window is not None and now - window.told_s <= TOGETHER_S:
            has = max(has, window.requests)
        elif len(self._windows) >= MAX_WINDOWS:
            self._windows.clear()
        self._windows[worker] = LossWindow(has, now)
        return has


def _why(crashes: CrashHistory) -> str:
    """The sentence that the client of a rejected request is told."""
    return (
        f"{crashes.deaths + crashes.late} workers in a row failed or stood still while they had this request and "
        "before they answered it; no other one is asked. Change the request, or look into their logs, before it is "
        "sent again"
    )
