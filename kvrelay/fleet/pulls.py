"""Pages that the router has one store push to another, so that a prompt can be computed beside them. It must never ask
for the same way again right after it failed, nor leave bytes counted that do not travel any more."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from kvrelay.fleet.holdings import Holdings
from kvrelay.fleet.holds import Ending
from kvrelay.fleet.links import Links
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import PageFormat, PageName, Stage, Value

MAX_PULLS = 256
"""Open at a time; more prompts go without."""
COOL_S = 5.0
"""How long a way is left alone after a pull over it did not come to its end."""
REMEMBERED = 1024
"""Pulls that are over whose late milestones are expected."""


class Pull(Value, frozen=True, kw_only=True):
    """One push from store to store that the router ordered."""

    transfer: str
    source: str
    target: str
    """Names of the stores."""
    names: tuple[PageName, ...]
    """All pages of the prefix, those included that the target has."""
    format: PageFormat
    size_bytes: int
    """Bytes of the pages that the target lacks, as far as is known."""
    begun_s: float
    until_s: float


class Pulls:
    """Open pulls of one router."""

    def __init__(self, links: Links, holdings: Holdings) -> None:
        self._links = links
        self._holdings = holdings
        self._open: dict[str, Pull] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._cooling: dict[tuple[str, str], float] = {}
        self._begun = 0
        self.endings: Counter[Ending] = Counter()
        self.moved_bytes = 0

    def __repr__(self) -> str:
        return f"<Pulls {len(self._open)} open, {self.endings.total()} over>"

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Pull]:
        return iter(self._open.values())

    def cooling(self, now: float) -> set[tuple[str, str]]:
        """Ways (source, target) that nothing is pulled over now."""
        for way in [way for way, until_s in self._cooling.items() if until_s <= now]:
            del self._cooling[way]
        return set(self._cooling)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MAX_PULLS

    def next_transfer(self, key: str) -> str:
        """A name that no pull had before, for the prompt ``key``."""
        self._begun += 1
        return f"{key}/pull/{self._begun}"

    def begin(self, pull: Pull) -> None:
        self._open[pull.transfer] = pull
        self._links.promise(pull.source, pull.target, pull.size_bytes)

    def knows(self, transfer: str) -> bool:
        """Whether its milestones belong here."""
        return transfer in self._open or transfer in self._over

    def heard(self, event: TransferEvent, now: float) -> Ending | None:
        """A store told a milestone of a pull; how it ended, when it did now."""
        pull = self._open.get(event.transfer)
        if pull is None or event.stage not in (Stage.ARRIVED, Stage.FAILED):
            return None
        if event.stage is Stage.FAILED:
            return self._end(pull, Ending.LOST, now)
        self.moved_bytes += event.bytes
        if event.bytes:
            move = self._links.move(pull.source, pull.target)
            self._links.learn(pull.source, pull.target, move.saw(event.bytes, now - pull.begun_s))
        self._holdings.store_has(pull.target, pull.names, pull.format)
        return self._end(pull, Ending.CAME, now)

    def expire(self, now: float) -> list[str]:
        """Transfers of pulls that took too long: nobody waits for them any more."""
        late = [pull for pull in self._open.values() if pull.until_s <= now]
        for pull in late:
            self._end(pull, Ending.LATE, now)
        return [pull.transfer for pull in late]

    def lose(self, transfer: str, now: float) -> None:
        """Its source or its target is gone."""
        self._end(self._open[transfer], Ending.LOST, now)

    def _end(self, pull: Pull, ending: Ending, now: float) -> Ending:
        del self._open[pull.transfer]
        self._over[pull.transfer] = None
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._links.promise(pull.source, pull.target, -pull.size_bytes)
        self.endings[ending] += 1
        if ending is not Ending.CAME:
            self._cooling[pull.source, pull.target] = now + COOL_S
        return ending

    def moving(self) -> Iterable[tuple[tuple[str, str], int]]:
        """Bytes on each way."""
        return [((pull.source, pull.target), pull.size_bytes) for pull in self._open.values()]
