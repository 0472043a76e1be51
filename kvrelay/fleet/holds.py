"""Prompts that are held back in the router until a prefix of theirs is in reach. It must never hold one without an
end: what does not come is given up at a known time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeVar

from kvrelay.fleet.flight import PrefillOrder
from kvrelay.policy.cost import Kind
from kvrelay.types import PageName, Value

Key = tuple[str, int]
"""Request and prompt."""
G = TypeVar("G", str, PageName)

OWN = -1
"""Index of a hold that D itself waits for, to compute the prompt."""


class Ending(StrEnum):
    """How a hold ended."""

    CAME = "came"
    LATE = "late"
    """The prefix did not come within the predicted time and a margin."""
    LOST = "lost"
    """The prefix will not come: the worker or store that was to bring it failed, left, or was called off."""


class Hold(Value, frozen=True, kw_only=True):
    """One prompt that is held back for a prefix."""

    request_id: str
    index: int
    kind: Kind
    work: str
    """Key in ``Underway`` of the work that brings the prefix."""
    worker: str | None
    """The worker that computes the prefix; None: a store pushes it."""
    page: PageName
    """The last page of the prefix."""
    reach: frozenset[str]
    """Names of holders in the index: the prompt may go when one of them has ``page``."""
    computed_on: str
    """The worker that is to compute the rest of the prompt."""
    seconds: float
    """Predicted time that it takes to compute the rest."""
    since_s: float
    predicted_s: float
    """Predicted time until the prefix is in reach."""
    until_s: float
    order: PrefillOrder | None
    """The order to send then; None for ``OWN``."""

    @property
    def key(self) -> Key:
        return self.request_id, self.index


class Holds:
    """All prompts that are held back, found by request, by work and by page."""

    def __init__(self) -> None:
        self._holds: dict[Key, Hold] = {}
        self._by_work: dict[str, dict[Key, None]] = {}
        self._by_page: dict[PageName, dict[Key, None]] = {}
        self._by_worker: dict[str, dict[Key, None]] = {}
        self._seconds: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Holds {len(self._holds)} prompts, for {len(self._by_work)} works>"

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def add(self, hold: Hold) -> None:
        self._holds[hold.key] = hold
        self._by_work.setdefault(hold.work, {})[hold.key] = None
        self._by_page.setdefault(hold.page, {})[hold.key] = None
        self._by_worker.setdefault(hold.computed_on, {})[hold.key] = None
        self._seconds[hold.computed_on] = self.seconds_at(hold.computed_on) + hold.seconds

    def seconds_at(self, worker: str) -> float:
        """Seconds that ``worker`` will take for the prompts that are held back for it: they will come at about the same
        time."""
        return self._seconds.get(worker, 0.0)

    def take(self, request_id: str, index: int) -> Hold | None:
        """Release one prompt; None when it is not held."""
        hold = self._holds.pop((request_id, index), None)
        if hold is not None:
            _remove(self._by_work, hold.work, hold.key)
            _remove(self._by_page, hold.page, hold.key)
            _remove(self._by_worker, hold.computed_on, hold.key)
            self._seconds[hold.computed_on] -= hold.seconds
            if hold.computed_on not in self._by_worker:
                del self._seconds[hold.computed_on]  # with what sums of floats have drifted
        return hold

    def take_work(self, work: str) -> list[Hold]:
        """Release the prompts that wait for ``work``, which is over."""
        return self._take_all(self._by_work.get(work, ()))

    def take_pages(self, holder: str, names: Sequence[PageName]) -> list[Hold]:
        """Release the prompts whose prefix is in reach now that ``holder`` has the pages of ``names``."""
        if not self._by_page:
            return []
        keys = [key for name in self._by_page.keys() & set(names) for key in self._by_page[name]]
        return self._take_all(key for key in keys if holder in self._holds[key].reach)

    def take_overdue(self, now: float) -> list[Hold]:
        """Release the prompts that have waited long enough."""
        return self._take_all(key for key, hold in self._holds.items() if hold.until_s <= now)

    def _take_all(self, keys: Iterable[Key]) -> list[Hold]:
        taken = [self.take(*key) for key in list(keys)]
        return [hold for hold in taken if hold is not None]


def _remove(groups: dict[G, dict[Key, None]], group: G, key: Key) -> None:
    members = groups[group]
    del members[key]
    if not members:
        del groups[group]
