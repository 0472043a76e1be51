"""What was promised to each worker. Every reservation is released exactly once, so an idle fleet reads zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvrelay.types import Value


class PrefillReservation(Value, frozen=True, kw_only=True):
    """One P leg: uncached tokens promised to a worker."""

    worker: str
    tokens: int


class DecodeReservation(Value, frozen=True, kw_only=True):
    """One D leg: run slots and KV promised by a worker."""

    worker: str
    sequences: int
    kv_tokens: int


class Loads:
    """Sums of all open reservations, by worker name."""

    def __init__(self) -> None:
        self.queued_tokens: Counter[str] = Counter()
        self.prefill_legs: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self.kv_tokens: Counter[str] = Counter()
        self._chosen: dict[str, int] = {}
        self._choices = 0

    def __repr__(self) -> str:
        legs, sequences = self.prefill_legs.total(), self.sequences.total()
        return f"<Loads {legs} prefill legs, {sequences} sequences>"

    def last_chosen(self, worker: str) -> int:
        return self._chosen.get(worker, 0)

    def _choose(self, worker: str) -> None:
        self._choices += 1
        self._chosen[worker] = self._choices

    def reserve_prefill(self, reservation: PrefillReservation) -> None:
        self._choose(reservation.worker)
        self.prefill_legs[reservation.worker] += 1
        self.queued_tokens[reservation.worker] += reservation.tokens

    def release_prefill(self, reservation: PrefillReservation) -> None:
        self.prefill_legs[reservation.worker] -= 1
        self.queued_tokens[reservation.worker] -= reservation.tokens

    def reserve_decode(self, reservation: DecodeReservation) -> None:
        self._choose(reservation.worker)
        self.sequences[reservation.worker] += reservation.sequences
        self.kv_tokens[reservation.worker] += reservation.kv_tokens

    def release_decode(self, reservation: DecodeReservation) -> None:
        self.sequences[reservation.worker] -= reservation.sequences
        self.kv_tokens[reservation.worker] -= reservation.kv_tokens

    def keep_only(self, workers: Iterable[str]) -> None:
        """Drop the rows of workers that nobody knows any more, unless requests still hold reservations there."""
        known = set(workers)
        for worker in self._chosen.keys() - known:
            if self.prefill_legs[worker] == self.sequences[worker] == 0:
                for counter in self._counters():
                    del counter[worker]
                del self._chosen[worker]

    def _counters(self) -> tuple[Counter[str], ...]:
        return self.queued_tokens, self.prefill_legs, self.sequences, self.kv_tokens

    def check(self, prefills: Iterable[PrefillReservation], decodes: Iterable[DecodeReservation]) -> None:
        """Raise AssertionError unless the sums are exactly those of the open reservations."""
        expected = Loads()
        for prefill in prefills:
            expected.reserve_prefill(prefill)
        for decode in decodes:
            expected.reserve_decode(decode)
        for mine, theirs in zip(self._counters(), expected._counters(), strict=True):
            if +mine != +theirs or min(mine.values(), default=0) < 0:
                raise AssertionError(f"reserved {dict(mine)}, but open reservations add up to {dict(theirs)}")
