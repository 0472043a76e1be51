"""What was promised to each worker. Every reservation is released exactly once, so an idle fleet reads zero."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from kvrelay.fleet.backlog import Backlog, Promise
from kvrelay.fleet.links import Links
from kvrelay.types import Value

USUAL_WEIGHT = 0.05


class PrefillReservation(Value, frozen=True, kw_only=True):
    """One P leg: uncached tokens promised to a worker, and the way that its KV will take."""

    worker: str
    key: str
    """Transfer of the prefill leg."""
    tokens: int
    seconds: float = 0.0
    """Predicted time to compute the tokens."""
    due_s: float = 0.0
    """Predicted time until the prompt is computed, with all work before it."""
    step_s: float = 0.0
    """Time of one step of the prompt, after each of which it lets much shorter prompts pass; 0: it never does."""
    source: str
    target: str
    """Stores of P and of D."""
    bytes: int = 0
    """KV that D's store lacks."""


class DecodeReservation(Value, frozen=True, kw_only=True):
    """One D leg: run slots and KV promised by a worker."""

    worker: str
    key: str
    """Id of the request."""
    sequences: int
    kv_tokens: int
    prefill_s: float = 0.0
    """Predicted time to compute the prompt, when D does that itself."""
    step_s: float = 0.0


class Loads:
    """Sums of all open reservations, by worker name."""

    def __init__(self) -> None:
        self.queued_tokens: Counter[str] = Counter()
        self.prefill_legs: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self.kv_tokens: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        """The part of ``sequences`` that each worker was asked for: before it is asked, nothing that it does delays
        them."""
        self.links = Links()
        self._backlogs: defaultdict[str, Backlog] = defaultdict(Backlog)
        """Backlogs of the workers that have one."""
        self._held: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """Predicted seconds of prompts that their worker is not asked for yet, by worker and transfer: it does not
        compute them meanwhile."""
        self._asked: set[tuple[str, str]] = set()
        """Worker and key of those."""
        self._usual: dict[str, float] = {}
        self._chosen: dict[str, int] = {}
        self._choices = 0

    def __repr__(self) -> str:
        legs, sequences = self.prefill_legs.total(), self.sequences.total()
        return f"<Loads {legs} prefill legs, {sequences} sequences>"

    def last_chosen(self, workers: Iterable[str]) -> list[int]:
        """Order of each one's last choice; 0: it was never chosen."""
        return [self._chosen.get(worker, 0) for worker in workers]

    def wait_s(self, worker: str, now: float, own_s: float = math.inf) -> float:
        """Seconds by which promised prompts delay one that comes to ``worker`` now; see ``Backlog.wait_s``."""
        backlog = self._backlogs.get(worker)
        return backlog.wait_s(now, own_s) if backlog else 0.0

    def passed(self, worker: str, own_s: float, now: float) -> int:
        """How many prompts that ``worker`` was sent stand back for one that comes now and takes ``own_s``."""
        backlog = self._backlogs.get(worker)
        return backlog.passed(own_s, now) if backlog else 0

    def held_s(self, worker: str, at_most_s: float = math.inf) -> float:
        """Seconds that prompts will take which are held back for ``worker``, each of them ``at_most_s``."""
        return sum(min(seconds, at_most_s) for seconds in self._held[worker].values()) if worker in self._held else 0.0

    def prompts(self, worker: str) -> int:
        """How many prompts ``worker`` was sent and has still to compute."""
        backlog = self._backlogs.get(worker)
        return len(backlog) if backlog else 0

    def is_passed_over(self, reservation: PrefillReservation) -> bool:
        """Whether its worker seems to have lost it: one that was sent there later, and takes as long at least, was
        computed before it."""
        backlog = self._backlogs.get(reservation.worker)
        return backlog is not None and backlog.is_overtaken(reservation.key)

    def busy(self) -> set[str]:
        """Workers with prompts to compute, or for which some are held back; all others are idle."""
        return self._backlogs.keys() | self._held.keys()

    def usually_running(self, workers: Iterable[str]) -> list[float]:
        """How many ran at each, by the choices of the recent past."""
        return [self._usual.get(worker, 0.0) for worker in workers]

    def _choose(self, worker: str) -> None:
        self._choices += 1
        self._chosen[worker] = self._choices

    def reserve_prefill(self, reservation: PrefillReservation, now: float) -> None:
        worker = reservation.worker
        self._choose(worker)
        self.prefill_legs[worker] += 1
        self.queued_tokens[worker] += reservation.tokens
        self._backlogs[worker].add(reservation.key, _promise(reservation), now)
        self.links.promise(reservation.source, reservation.target, reservation.bytes)

    def hold(self, reservation: PrefillReservation, now: float) -> None:
        """A prompt that was promised to a worker is not sent yet."""
        self._held[reservation.worker][reservation.key] = reservation.seconds
        self._withdraw(reservation, now)

    def send(self, reservation: PrefillReservation, now: float) -> None:
        """A prompt that was held is sent: it comes behind those that are there."""
        self._let_go(reservation)
        self._backlogs[reservation.worker].add(reservation.key, _promise(reservation), now)

    def release_prefill(self, reservation: PrefillReservation, now: float) -> None:
        worker = reservation.worker
        self.prefill_legs[worker] -= 1
        self.queued_tokens[worker] -= reservation.tokens
        self._let_go(reservation)
        self._withdraw(reservation, now)
        self.links.promise(reservation.source, reservation.target, -reservation.bytes)

    def _let_go(self, reservation: PrefillReservation) -> None:
        held = self._held.get(reservation.worker)
        if held is not None:
            held.pop(reservation.key, None)
            if not held:
                del self._held[reservation.worker]

    def computed(self, reservation: PrefillReservation | DecodeReservation, now: float) -> None:
        """Its prompt is done; to be told of those alone that were computed, and before they are released."""
        backlog = self._backlogs.get(reservation.worker)
        if backlog is not None:
            backlog.computed(reservation.key, now)
        self._withdraw(reservation, now)

    def _withdraw(self, reservation: PrefillReservation | DecodeReservation, now: float) -> None:
        worker = reservation.worker
        backlog = self._backlogs.get(worker)
        if backlog is not None:
            backlog.withdrawn(reservation.key, now)
            if not backlog:
                del self._backlogs[worker]

    def reserve_decode(self, reservation: DecodeReservation, now: float) -> None:
        worker = reservation.worker
        self._choose(worker)
        self.sequences[worker] += reservation.sequences
        self.kv_tokens[worker] += reservation.kv_tokens
        usual = self._usual.get(worker, 0.0)
        self._usual[worker] = usual + USUAL_WEIGHT * (self.running[worker] - usual)
        if reservation.prefill_s:
            promise = Promise(seconds=reservation.prefill_s, step_s=reservation.step_s, expires=True)
            self._backlogs[worker].add(reservation.key, promise, now)

    def asked(self, reservation: DecodeReservation) -> None:
        """D is asked for the answer; to say so again changes nothing."""
        asked = reservation.worker, reservation.key
        if asked not in self._asked:
            self._asked.add(asked)
            self.running[reservation.worker] += reservation.sequences

    def is_asked(self, reservation: DecodeReservation) -> bool:
        """Whether its D was asked for the answer."""
        return (reservation.worker, reservation.key) in self._asked

    def release_decode(self, reservation: DecodeReservation, now: float) -> None:
        self.sequences[reservation.worker] -= reservation.sequences
        self.kv_tokens[reservation.worker] -= reservation.kv_tokens
        if (asked := (reservation.worker, reservation.key)) in self._asked:
            self._asked.remove(asked)
            self.running[reservation.worker] -= reservation.sequences
        self._withdraw(reservation, now)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Drop the rows of workers that nobody knows any more, unless requests still hold reservations there."""
        known = set(workers)
        for worker in self._chosen.keys() - known:
            if self.prefill_legs[worker] == self.sequences[worker] == 0:
                for counter in (*self._counters(), self.running):
                    del counter[worker]
                self._backlogs.pop(worker, None)
                self._held.pop(worker, None)
                self._usual.pop(worker, None)
                del self._chosen[worker]

    def _counters(self) -> tuple[Counter[str], ...]:
        return self.queued_tokens, self.prefill_legs, self.sequences, self.kv_tokens

    def check(
        self,
        prefills: Iterable[PrefillReservation],
        decodes: Iterable[DecodeReservation],
        pulls: Iterable[tuple[tuple[str, str], int]] = (),
    ) -> None:
        """Raise AssertionError unless the sums are exactly those of the open reservations, and of ``pulls``' bytes."""
        expected, legs = Loads(), list(prefills)
        for prefill in legs:
            expected.reserve_prefill(prefill, 0.0)
        for decode in decodes:
            expected.reserve_decode(decode, 0.0)
        for mine, theirs in zip(self._counters(), expected._counters(), strict=True):
            if +mine != +theirs or min(mine.values(), default=0) < 0:
                raise AssertionError(f"reserved {dict(mine)}, but open reservations add up to {dict(theirs)}")
        if any(not 0 <= running <= self.sequences[worker] for worker, running in self.running.items()):
            raise AssertionError(f"{dict(self.running)} run of {dict(self.sequences)}")
        for worker in {*self._backlogs, *(leg.worker for leg in legs)}:
            backlog, theirs_too = self._backlogs.get(worker, Backlog()), expected._backlogs[worker]
            held = self._held.get(worker, {}).keys()
            sent = {leg.key for leg in legs if leg.worker == worker} - held
            if not sent <= backlog.keys() <= theirs_too.keys() - held:
                raise AssertionError(f"{worker} has {backlog!r}, but open reservations make {theirs_too!r}")
        promised = {(leg.worker, leg.key) for leg in legs}
        waiting = {(worker, key) for worker, held in self._held.items() for key in held}
        assert waiting <= promised, "a prompt is held that nobody promised"
        moving: Counter[tuple[str, str]] = Counter()
        for leg in legs:
            moving[leg.source, leg.target] += leg.bytes
        for way, size_bytes in pulls:
            moving[way] += size_bytes
        self.links.check(moving)


def _promise(reservation: PrefillReservation) -> Promise:
    return Promise(seconds=reservation.seconds, step_s=reservation.step_s)
