"""Which pages live where: what engines and stores report, and of workers that report nothing what was sent to them.

It must never show a page of a dead incarnation, nor, for longer than a repair takes, one whose removal it may have
missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.fleet.coverage import Coverage
from kvrelay.fleet.event_stream import EventStream, State, Step
from kvrelay.fleet.page_map import PageMap
from kvrelay.fleet.sent import SentPages
from kvrelay.protocol.feed import PageEvents, PageSnapshot, PagesWanted
from kvrelay.types import Medium, PageName

MAX_PAGES = 1 << 20
"""Names in the index unless told otherwise: 130 MB, and every page of 32 million tokens."""
MAX_SENT = 16_384
"""Names remembered of what was sent to one worker."""
PENDING_S = 30.0
"""How long what was sent to a worker counts when it reports what it has; it does so within a step or two."""
GUESS_S = 600.0
"""The same for a worker that reports nothing."""
SWEPT_EXTENTS = 128
"""Extents a ``tick`` cleans: some ms at most."""


def store_key(name: str) -> str:
    """Name of a store as a holder, where a worker may be called like it."""
    return f"\0{name}"


def store_name(holder: str) -> str | None:
    """The store that is a holder by this name; None for a worker."""
    return holder[1:] if holder.startswith("\0") else None


@dataclass
class Holder:
    """One incarnation of a worker or store."""

    incarnation: str
    sent: SentPages
    stream: EventStream = field(default_factory=EventStream)


class PageIndex:
    """All holders. A restarted one starts empty."""

    def __init__(self, limit: int = MAX_PAGES) -> None:
        self.gaps = 0
        """How often events were missing."""
        self.applied = 0
        """Messages that changed what is known."""
        self.stale = 0
        """Messages of incarnations that are not current."""
        self._map = PageMap(limit)
        self._holders: dict[str, Holder] = {}
        self._sending: dict[str, SentPages] = {}
        """What was sent to holders and not reported on; empty ones are taken out when they are met."""
        self._places: dict[str, dict[Medium, int]] = {}
        self._wholes: dict[str, int] = {}
        """Bits of all places of each holder."""
        self._last: tuple[Sequence[PageName], Coverage] | None = None
        """The last question and its answer, until something changes: it is asked for every worker."""

    def __repr__(self) -> str:
        sent = sum(len(holder.sent) for holder in self._holders.values())
        return f"<PageIndex {len(self._holders)} holders, {len(self._map)} pages, {sent} sent>"

    def __len__(self) -> int:
        """Names of pages that a holder reported."""
        return len(self._map)

    @property
    def turned_away(self) -> int:
        """Pages for which there was no room."""
        return self._map.turned_away

    # ------------------------------------------------------------ holders

    def open(self, holder: str, incarnation: str, now: float) -> PagesWanted:
        """``holder`` registered, over a new link. What to ask it for."""
        return self._holder(holder, incarnation).stream.relinked(now)

    def _holder(self, name: str, incarnation: str, limit: int = MAX_SENT) -> Holder:
        holder = self._holders.get(name)
        if holder is None or holder.incarnation != incarnation:
            self.drop(name)
            holder = self._holders[name] = Holder(incarnation, SentPages(incarnation, min(limit, MAX_SENT)))
        return holder

    def drop(self, holder: str) -> None:
        """Forget a holder and all its pages, at once."""
        self._sending.pop(holder, None)
        if self._holders.pop(holder, None) is not None:
            self._empty(holder)

    def _empty(self, holder: str) -> None:
        self._last = None
        self._wholes.pop(holder, None)
        for place in self._places.pop(holder, {}).values():
            self._map.close(place)

    def keep_only(self, holders: Iterable[str]) -> None:
        """Forget holders that nobody knows any more."""
        for holder in self._holders.keys() - set(holders):
            self.drop(holder)

    def streams(self) -> dict[str, EventStream]:
        """How whole the knowledge of each holder is."""
        return {name: holder.stream for name, holder in self._holders.items()}

    def count(self, holder: str) -> int:
        """Pages that ``holder`` reported, all media."""
        return sum(map(self._map.count, self._places.get(holder, {}).values()))

    # ------------------------------------------------------------ what holders report

    def take(self, holder: str, incarnation: str, message: PageEvents | PageSnapshot, now: float) -> PagesWanted | None:
        """``incarnation`` is the link's. What to ask the holder for, when something is missing."""
        known = self._holders.get(holder)
        if message.incarnation != incarnation or (known is not None and known.incarnation != incarnation):
            self.stale += 1
            return None
        self._last = None
        known = self._holder(holder, incarnation)
        stream, was_open = known.stream, known.stream.state is State.GAP
        step = stream.events(message, now) if isinstance(message, PageEvents) else stream.snapshot(message)
        self.gaps += stream.state is State.GAP and not was_open
        if step in (Step.RESTART, Step.FORGET):
            self._empty(holder)
        if step in (Step.RESTART, Step.APPLY):
            self.applied += 1
            self._apply(holder, known.sent, message)
        return stream.wanted(now)

    def wanted(self, holder: str, incarnation: str, now: float) -> PagesWanted | None:
        """``holder``, whose current life this is, shows that it lives, with or without news: what to ask it for, when
        something is missing still."""
        return self._holder(holder, incarnation).stream.wanted(now)

    def _apply(self, holder: str, sent: SentPages, message: PageEvents | PageSnapshot) -> None:
        if isinstance(message, PageSnapshot):
            self._store(holder, sent, message.medium, message.names)
            return
        for change in message.changes:
            if change.removed:
                sent.settle(change.removed)
                self._map.remove(self._place(holder, change.medium), change.removed)
            if change.stored:
                self._store(holder, sent, change.medium, change.stored)

    def _store(self, holder: str, sent: SentPages, medium: Medium, names: Sequence[PageName]) -> None:
        sent.settle(names)
        self._map.store(self._place(holder, medium), names)

    def _place(self, holder: str, medium: Medium) -> int:
        places = self._places.setdefault(holder, {})
        if medium not in places:
            places[medium] = self._map.open()
            self._wholes[holder] = sum(places.values())
        return places[medium]

    # ------------------------------------------------------------ what is sent to them

    def add(self, worker: str, incarnation: str, names: Sequence[PageName], limit: int) -> None:
        """``names`` go to ``worker``; ``limit`` is how many pages it can hold."""
        sent = self._sending[worker] = self._holder(worker, incarnation, limit).sent
        sent.add(names)

    # ------------------------------------------------------------ questions

    def find(self, names: Sequence[PageName]) -> Coverage:
        """Where a prompt's leading pages are, as reported. Costs 5 to 10 us for 128 pages."""
        if self._last is not None and self._last[0] is names:
            return self._last[1]
        coverage = Coverage(self._map.find(names), self._places, self._wholes)
        if isinstance(names, tuple):  # nobody can have put other names into it
            self._last = names, coverage
        return coverage

    def prefix(self, holder: str, incarnation: str, names: Sequence[PageName]) -> int:
        """How many of ``names``, from the first on, a holder has, or was sent and has not reported on yet."""
        known = self._holders.get(holder)
        if known is None or known.incarnation != incarnation:
            return 0
        held = self.find(names).at(holder)
        return held + known.sent.prefix(names, held)

    def depths(self, names: Sequence[PageName]) -> dict[str, int]:
        """``prefix`` of every holder that has or was sent the first page, at a fraction of the time."""
        found = self.find(names).leading()
        for name, sent in list(self._sending.items()):
            if not sent:
                del self._sending[name]
            elif more := sent.prefix(names, found.get(name, 0)):
                found[name] = found.get(name, 0) + more
        return found

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Give up gaps that were not closed, forget what was sent long ago, and drop pages of holders that are gone."""
        for name, holder in self._holders.items():
            if holder.stream.is_lost(now):
                holder.stream.forget()
                self._empty(name)
            if now - holder.sent.turned_s > (PENDING_S if holder.stream.is_heard else GUESS_S) / 2:
                holder.sent.turned_s = now
                holder.sent.turn()
        self._map.sweep(SWEPT_EXTENTS)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the parts agree."""
        self._map.check_invariants()
        assert self._places.keys() <= self._holders.keys(), "pages of a holder that is unknown"
        wholes = {holder: sum(places.values()) for holder, places in self._places.items() if places}
        assert self._wholes == wholes, "places of a holder are mixed up"
