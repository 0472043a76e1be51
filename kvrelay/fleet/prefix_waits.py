"""Lets prompts go on that were held back for a prefix, whatever became of it. It must never forget one of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from kvrelay.fleet.flight import Command, Flight, LegState, PromptLeg
from kvrelay.fleet.holds import OWN, Ending, Hold
from kvrelay.fleet.launch import Launcher
from kvrelay.fleet.membership import Member, holder_of
from kvrelay.fleet.prefixes import Prefixes
from kvrelay.policy.cost import Kind
from kvrelay.protocol.feed import PageEvents, PageSnapshot, TransferEvent
from kvrelay.types import PageName


class PrefixWaits:
    """Turns ends of works, pages that are seen and time into commands."""

    def __init__(
        self,
        prefixes: Prefixes,
        launcher: Launcher,
        flights: Mapping[str, Flight],
        go_on: Callable[[Flight, float], list[Command]],
    ) -> None:
        """``go_on``: D's turn, where it has come."""
        self._prefixes = prefixes
        self._launcher = launcher
        self._flights = flights
        self._go_on = go_on
        self._ended: deque[tuple[Hold, Ending]] = deque()
        """Held no more; what becomes of them is decided by the next ``flush``."""
        self.endings: Counter[tuple[Kind, Ending]] = Counter()
        self.waited_s: dict[Kind, float] = {}

    def __repr__(self) -> str:
        return f"<PrefixWaits {self._prefixes.holds!r}, {self.endings.total()} over>"

    # ------------------------------------------------------------ what happens

    def computed(self, key: str, now: float) -> list[Command]:
        """A prompt is computed."""
        self._note(self._prefixes.over(key), Ending.CAME)
        return self.flush(now)

    def failed(self, key: str) -> None:
        """A prompt will not be computed, or not there; to be followed by ``flush``."""
        self._note(self._prefixes.over(key), Ending.LOST)

    def pages_seen(self, member: Member, message: PageEvents | PageSnapshot, now: float) -> list[Command]:
        """``member`` told of pages that it has."""
        if self._prefixes.holds:
            for names in _stored(message):
                self._note(self._prefixes.holds.take_pages(holder_of(member), names), Ending.CAME)
        return self.flush(now)

    def heard(self, event: TransferEvent, now: float) -> list[Command]:
        """A store told a milestone of a pull."""
        self._note(*self._prefixes.heard(event, now))
        return self.flush(now)

    def tick(self, now: float) -> list[Command]:
        """Time passed."""
        self._note(self._prefixes.cut_off(now), Ending.LOST)
        self._note(self._prefixes.overdue(now), Ending.LATE)
        return self.flush(now)

    def abandon(self, flight: Flight, leg: PromptLeg) -> None:
        """The P for which a prompt is held back is gone; to be followed by ``flush``."""
        hold = self._prefixes.holds.take(flight.request_id, leg.index)
        self._note([hold] if hold is not None else [], Ending.LOST)

    def drop(self, flight: Flight, now: float) -> None:
        """Nothing of a request is held any more, and it computes nothing for others; to be followed by ``flush``."""
        for leg in flight.legs:
            self._prefixes.holds.take(flight.request_id, leg.index)
            if leg.state is LegState.HELD:
                self.failed(leg.transfer)
                self._launcher.withdraw(leg, now)
        self._prefixes.holds.take(flight.request_id, OWN)

    # ------------------------------------------------------------ what becomes of it

    def _note(self, holds: Iterable[Hold], ending: Ending) -> None:
        self._ended.extend((hold, ending) for hold in holds)

    def flush(self, now: float) -> list[Command]:
        """Let all go on that need wait no more. What was lost may have been waited for by others, and so on."""
        commands: list[Command] = []
        while self._ended:
            hold, ending = self._ended.popleft()
            flight = self._flights.get(hold.request_id)
            if flight is not None and not flight.dispatched:
                self._count(flight, hold, ending, now)
                commands += self._resume(flight, hold, ending, now)
        return commands

    def _count(self, flight: Flight, hold: Hold, ending: Ending, now: float) -> None:
        self.endings[hold.kind, ending] += 1
        self.waited_s[hold.kind] = self.waited_s.get(hold.kind, 0.0) + now - hold.since_s
        flight.timeline.released(hold.index, ending, now)
        flight.heard_s = now

    def _resume(self, flight: Flight, hold: Hold, ending: Ending, now: float) -> list[Command]:
        if hold.index == OWN:
            return self._go_on(flight, now)
        leg = flight.legs[hold.index]
        if ending is not Ending.CAME:
            self.failed(leg.transfer)
        assigned = self._launcher.resume(flight, hold, ending, now)
        return assigned.commands(flight.request_id) if assigned is not None else self._go_on(flight, now)


def _stored(message: PageEvents | PageSnapshot) -> list[list[PageName]]:
    if isinstance(message, PageSnapshot):
        return [message.names]
    return [change.stored for change in message.changes]
