"""Workers that are to become empty: no new work goes there, and what they have begun is counted until it is over. It
must never take away an answer that nobody else could write on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvrelay.errors import Refused
from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.flight import AbandonDecode, Flight, LegState, PromptLeg
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.member import Member
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.breaker import State
from kvrelay.policy.loss import LossReason
from kvrelay.protocol.operator import Remaining
from kvrelay.types import Drain, WorkerInfo


class Drains:
    """The view of one router: others have requests of their own at the same workers."""

    def __init__(self, fleet: Fleet, breakers: Breakers, loads: Loads, flights: Mapping[str, Flight]) -> None:
        self._fleet = fleet
        self._breakers = breakers
        self._loads = loads
        self._flights = flights

    def __repr__(self) -> str:
        names = [member.info.name for member in self._fleet.workers if member.draining]
        return f"<Drains of {', '.join(names) or 'nobody'}>"

    def begin(self, name: str, now: float, *, force: bool = False) -> None:
        """Give ``name`` no new work. Raises ``Refused`` when nobody else could be given it, unless forced."""
        member = self._known(name)
        if not (force or member.draining) and member.info.role.decodes and not self._is_spared(member.info, now):
            others = ", ".join(f"{other.info.name} {self._why_not(other, now)}" for other in self._beside(member.info))
            raise Refused(
                f"{name} is the last worker that can be given answers of {member.info.model} to write "
                f"({others or 'there is no other'}): mend one or start another one first, or add --force: then "
                "clients get 503 until another one is ready or the drain is undone"
            )
        self._order(member, True)

    def undo(self, name: str) -> None:
        """Give ``name`` work again. Raises ``Refused``."""
        self._order(self._known(name), False)

    def _order(self, member: Member[WorkerInfo], draining: bool) -> None:
        member.order_drain(draining)
        self._fleet.workers.look_again()

    def heard(self, worker: WorkerInfo, told: Drain) -> None:
        """``worker`` says what it was told last, maybe by another router, or by this one before it was started anew."""
        member = self._fleet.workers.get(worker.name)
        if member is not None and member.info.incarnation == worker.incarnation:
            member.heard_drain(told)
            self._fleet.workers.look_again()

    def untold(self, worker: WorkerInfo) -> Drain | None:
        """The order that ``worker`` has still to be told."""
        member = self._fleet.workers.get(worker.name)
        if member is None or member.info.incarnation != worker.incarnation:
            return None
        return member.drain if member.drain.number > member.told_drain else None

    def hand_over(self, name: str, now: float) -> list[AbandonDecode]:
        """The streams that ``name`` writes go on elsewhere, from their pages. Raises ``Refused``."""
        member = self._known(name)
        if not member.draining or not self._is_spared(member.info, now):
            return []
        return [
            AbandonDecode(request_id=flight.request_id, reason=LossReason.DRAINED, if_resumable=True)
            for flight in self._flights.values()
            if flight.decode.worker == name
        ]

    def remaining(self, name: str, now: float) -> Remaining:
        """What ``name`` still does. Raises ``Refused``."""
        member = self._known(name)
        return Remaining(
            worker=name,
            incarnation=member.info.incarnation,
            draining=member.draining,
            gone=not self._fleet.workers.is_alive(name, now),
            prompts=self._loads.prefill_legs[name],
            answers=self._loads.sequences[name],
            transfers=sum(_is_unfetched(leg, name) for flight in self._flights.values() for leg in flight.legs),
        )

    def _known(self, name: str) -> Member[WorkerInfo]:
        member = self._fleet.workers.get(name)
        if member is None:
            known = ", ".join(member.info.name for member in self._fleet.workers) or "none"
            raise Refused(f"no worker is called {name[:100]!r}; this router knows {known}")
        return member

    def _is_spared(self, worker: WorkerInfo, now: float) -> bool:
        """Whether somebody else can be given the answers that it would write."""
        return any(not self._why_not(other, now) for other in self._beside(worker))

    def _beside(self, worker: WorkerInfo) -> Iterator[Member[WorkerInfo]]:
        """All others that write answers of its model, whatever their state."""
        for other in self._fleet.workers:
            if other.info.role.decodes and other.info.model == worker.model and other.info.name != worker.name:
                yield other

    def _why_not(self, other: Member[WorkerInfo], now: float) -> str:
        """Why it is given no answers to write; empty when it is. An open breaker lets a probe through, no more."""
        name = other.info.name
        if other.draining:
            return "is draining"
        if not self._fleet.workers.is_alive(name, now):
            return "is away"
        if not self._fleet.workers.is_usable(name, now):
            return "is not healthy"
        state = self._breakers.of(name).state
        return "" if state is State.CLOSED else f"fails, its circuit breaker is {state}"


def _is_unfetched(leg: PromptLeg, worker: str) -> bool:
    """Whether ``worker`` has computed the prompt and its pages are still on their way: without it they would not come,
    for its node's store gives a transfer up whose prefill worker is gone."""
    return leg.worker == worker and leg.state is LegState.FINISHED and not leg.transfer_over
