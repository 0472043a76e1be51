"""What one holder tells the routers about its pages: numbered changes, and a snapshot for who missed some.

It must never number two different changes alike, and keeps no more of the past than ``MAX_KEPT`` names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from kvrelay.protocol.feed import PageChange, PageEvents, PageSnapshot
from kvrelay.types import Medium, PageName

MAX_KEPT = 1 << 17
"""Names in past changes that can be told again."""
MAX_NAMES = 2048
"""Names in one message: 37 KB, which a router takes in within 2 ms; its streams wait for it."""


class PageLog:
    """The pages of one incarnation, by medium, and how they changed.

    Changes add up until somebody reads them, so that however many pages come and go, a slow reader costs no memory.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        """Number of the last change that was given one."""
        self._held: dict[Medium, set[PageName]] = {medium: set() for medium in Medium}
        self._fresh: dict[Medium, dict[PageName, bool]] = {medium: {} for medium in Medium}
        """Changes without a number yet: whether the page is there now."""
        self._past: deque[PageEvents] = deque()
        self._past_names = 0
        self._watchers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<PageLog {sum(map(len, self._held.values()))} pages, {len(self._past)} changes up to {self.sequence}>"

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever there is something new to read."""
        self._watchers.append(changed)

    # ------------------------------------------------------------ the holder tells

    def store(self, names: Iterable[PageName], medium: Medium) -> None:
        """These pages are there now."""
        held, fresh = self._held[medium], self._fresh[medium]
        new = dict.fromkeys(names)
        if not held.isdisjoint(new):
            new = dict.fromkeys(name for name in new if name not in held)
        held.update(new)
        if fresh.keys().isdisjoint(new):
            fresh.update(dict.fromkeys(new, True))
        else:
            for name in new:
                _note(fresh, name, there=True)
        self._tell()

    def remove(self, names: Iterable[PageName], medium: Medium) -> None:
        """These pages are gone."""
        held, fresh = self._held[medium], self._fresh[medium]
        for name in names:
            if name in held:
                held.discard(name)
                _note(fresh, name, there=False)
        self._tell()

    def held(self, medium: Medium) -> int:
        """How many pages a medium has."""
        return len(self._held[medium])

    def clear(self, medium: Medium) -> None:
        """All pages of a medium are gone."""
        self.remove(list(self._held[medium]), medium)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()

    # ------------------------------------------------------------ somebody reads

    def follow(self, after: int) -> Iterator[PageEvents | PageSnapshot | None]:
        """What a router needs that knows everything up to change ``after``, message by message, for ever.

        None: nothing is new, ask again after ``watch`` called. It snapshots when the changes are not kept any more.
        """
        while True:
            self._number()
            if not self._past_begins - 1 <= after <= self.sequence:
                after = self.sequence
                yield from self._snapshot()
            elif after == self.sequence:
                yield None
            else:
                after += 1
                yield self._past[after - self._past_begins]

    @property
    def _past_begins(self) -> int:
        """Number of the oldest change that is kept."""
        return self.sequence - len(self._past) + 1

    def _number(self) -> None:
        """Give the fresh changes their numbers. So many that nobody may read them later need only one, for all."""
        if sum(map(len, self._fresh.values())) > MAX_KEPT:
            for fresh in self._fresh.values():
                fresh.clear()
            self._past.clear()
            self._past_names = 0
            self.sequence += 1
        while any(self._fresh.values()):
            changes = [_cut(medium, fresh) for medium, fresh in self._fresh.items() if fresh]
            self.sequence += 1
            self._past.append(PageEvents(incarnation=self.incarnation, sequence=self.sequence, changes=changes))
            self._past_names += sum(map(_size, changes))
        while self._past_names > MAX_KEPT:
            self._past_names -= sum(map(_size, self._past.popleft().changes))

    def _snapshot(self) -> Iterator[PageSnapshot]:
        """All pages of this moment; what changes while it is read is told after it."""
        parts = [(medium, list(names)) for medium, names in self._held.items() if names] or [(Medium.HBM, [])]
        pieces = [(medium, names, at) for medium, names in parts for at in range(0, len(names) or 1, MAX_NAMES)]
        sequence = self.sequence
        for part, (medium, names, at) in enumerate(pieces):
            yield PageSnapshot(
                incarnation=self.incarnation,
                sequence=sequence,
                part=part,
                last=part == len(pieces) - 1,
                medium=medium,
                names=names[at : at + MAX_NAMES],
            )


def _note(fresh: dict[PageName, bool], name: PageName, *, there: bool) -> None:
    """A page came or went; who had just done the opposite has not changed at all."""
    if fresh.pop(name, there) is there:
        fresh[name] = there


def _cut(medium: Medium, fresh: dict[PageName, bool]) -> PageChange:
    """Take up to ``MAX_NAMES`` changes out of ``fresh``."""
    names = [name for name, _ in zip(fresh, range(MAX_NAMES), strict=False)]
    there = [fresh.pop(name) for name in names]
    stored = [name for name, is_there in zip(names, there, strict=True) if is_there]
    return PageChange(medium, [name for name, is_there in zip(names, there, strict=True) if not is_there], stored)


def _size(change: PageChange) -> int:
    """What keeping a change costs, in names."""
    return 8 + len(change.removed) + len(change.stored)
