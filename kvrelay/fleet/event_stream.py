"""What one incarnation of a holder has told so far, as far as it is known to be whole. It must never let an event pass
that does not follow the last one: a missed removal would show a page that is gone."""

from __future__ import annotations

from enum import Enum, auto

from kvrelay.protocol.feed import PageEvents, PageSnapshot, PagesWanted

NOTHING = -1
"""Sequence number before the first event; who asks for what follows it gets everything."""
REPAIR_S = 2.0
"""How long a gap may stay open: then the holder's pages are forgotten. Also how often it is asked again."""


class Step(Enum):
    """What to do with a message."""

    APPLY = auto()
    """The message follows the last one."""
    RESTART = auto()
    """Forget all pages of the holder, then apply it: a snapshot begins."""
    IGNORE = auto()
    """The message was seen before, or is of no use while one before it is missing."""
    FORGET = auto()
    """The message contradicts earlier ones: forget all pages of the holder."""


class State(Enum):
    """How complete the pages known of a holder are."""

    EMPTY = auto()
    READING = auto()
    """A snapshot is coming in."""
    FOLLOWING = auto()
    GAP = auto()
    """Events are missing; what was known before them is still shown, for ``REPAIR_S``."""


class EventStream:
    """Sequence numbers of one incarnation."""

    def __init__(self) -> None:
        self.state = State.EMPTY
        self.sequence = NOTHING
        """Number of the last event that was applied."""
        self._part = 0
        """Part of the snapshot that comes next."""
        self._asked_s: float | None = None
        self._gap_s = 0.0
        """When the gap was noticed."""

    def __repr__(self) -> str:
        return f"<EventStream {self.state.name.lower()} at {self.sequence}>"

    @property
    def is_heard(self) -> bool:
        """The holder tells what it has: nothing has to be guessed from what was sent to it."""
        return self.state is not State.EMPTY

    @property
    def is_whole(self) -> bool:
        """All that the holder has told until now is known."""
        return self.state is State.FOLLOWING

    def events(self, message: PageEvents, now: float) -> Step:
        """Judge an event."""
        if self.state in (State.EMPTY, State.READING) or message.sequence <= self.sequence:
            return Step.IGNORE
        if message.sequence == self.sequence + 1:
            self.sequence, self.state = message.sequence, State.FOLLOWING
            return Step.APPLY
        if self.state is State.FOLLOWING:
            self.state, self._gap_s, self._asked_s = State.GAP, now, None
        return Step.IGNORE

    def snapshot(self, message: PageSnapshot) -> Step:
        """Judge a part of a snapshot: they come in order, all with the sequence number that they are good for."""
        if message.part == 0:
            self.sequence = message.sequence
        elif self.state is not State.READING or (message.part, message.sequence) != (self._part, self.sequence):
            self.forget()
            return Step.FORGET
        self._part = message.part + 1
        self.state = State.FOLLOWING if message.last else State.READING
        return Step.APPLY if message.part else Step.RESTART

    def relinked(self, now: float) -> PagesWanted:
        """The holder has a new link: what was on its way over the old one is lost."""
        if self.state is State.READING:
            self.forget()
        return self._ask(now)

    def wanted(self, now: float) -> PagesWanted | None:
        """What to ask the holder for now, if anything."""
        if self.state not in (State.EMPTY, State.GAP):
            return None
        if self._asked_s is not None and now - self._asked_s < REPAIR_S:
            return None
        return self._ask(now)

    def _ask(self, now: float) -> PagesWanted:
        self._asked_s = now
        return PagesWanted(after=self.sequence)

    def is_lost(self, now: float) -> bool:
        """A gap was not closed in time."""
        return self.state is State.GAP and now - self._gap_s > REPAIR_S

    def forget(self) -> None:
        """Begin anew: nothing is known."""
        self.state, self.sequence = State.EMPTY, NOTHING
