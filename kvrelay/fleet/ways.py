"""Whether pages get from one store to another: a breaker for each way, fed by what became of transfers. It must never
blame a way for what a worker did, or a store without room."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from kvrelay.policy.breaker import Breaker, State
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage, Value

Way = tuple[str, str]
"""Names of the store that sends and of the one that receives."""

MAX_BREAKERS = 16_384
MAX_UNDER_WAY = 4096
MAX_TOLD = 256
"""Broken ways that are told one by one."""
PROBE_S = 30.0
"""A probe without an end for so long says nothing any more; the next one may be sent."""
UNTRIED_S = 600.0
"""What was found so long ago, and nobody has tried since, is no news."""

BREAKS_TO_OPEN = 3
"""Each sent after the one before had failed: a link that breaks with many pushes is one failure."""

_NONE: frozenset[Way] = frozenset()


class BrokenWay(Value, frozen=True, kw_only=True):
    """Transfers over it failed again and again, and none got through since."""

    source: str
    target: str
    state: str
    failures: int
    why: str
    """What the store said of the last one."""


class Sent(NamedTuple):
    """A transfer under way: from which store to which, and since when."""

    way: Way
    at_s: float


class Finding(NamedTuple):
    """What is known of one way over which nothing got through since a failure."""

    breaker: Breaker
    why: str
    """What the store said of the last failure."""
    tried_s: float
    """When something was sent over it, or failed to get through, for the last time."""
    failed_s: float
    """When the last failure came that counts."""


class Shut(NamedTuple):
    """Ways over which nothing may be sent, from one moment to another unless something changes."""

    ways: frozenset[Way]
    since_s: float
    until_s: float


class Ways:
    """A circuit breaker for each pair of stores, as far as one router hears of failures."""

    def __init__(self) -> None:
        self._findings: dict[Way, Finding] = {}
        """All other ways are well."""
        self._under_way: OrderedDict[str, Sent] = OrderedDict()
        """Transfers of which no end was heard; they may outlast their requests."""
        self._shut: Shut | None = None
        self.opened = 0
        """How often one was found broken that had been thought well."""

    def __repr__(self) -> str:
        broken = ", ".join(">".join(way) for way, _ in self._open())
        return f"<Ways broken: {broken or 'none'}>"

    def __len__(self) -> int:
        """Ways that are broken."""
        return len(self._open())

    def _open(self) -> list[tuple[Way, Finding]]:
        return [(way, found) for way, found in self._findings.items() if found.breaker.state is not State.CLOSED]

    def broken(self) -> list[BrokenWay]:
        """Broken ways, over which nothing or only a probe is sent; at most ``MAX_TOLD`` of them."""
        return [
            BrokenWay(
                source=way[0],
                target=way[1],
                state=found.breaker.state.value,
                failures=found.breaker.failures,
                why=found.why,
            )
            for way, found in islice(self._open(), MAX_TOLD)
        ]

    def is_broken(self, way: Way) -> bool:
        """Whether nothing got through since it was found broken, a probe that is due or not."""
        return way in self._findings and self._findings[way].breaker.state is not State.CLOSED

    def allows(self, way: Way, now: float) -> bool:
        """Whether pages may be sent over it now."""
        found = self._findings.get(way)
        return found is None or found.breaker.allows(now)

    def shut(self, now: float) -> frozenset[Way]:
        """Ways over which nothing may be sent now."""
        if not self._findings:
            return _NONE
        if self._shut is None or not self._shut.since_s <= now < self._shut.until_s:
            self._shut = self._look(now)
        return self._shut.ways

    def _look(self, now: float) -> Shut:
        breakers = ((way, found.breaker) for way, found in self._findings.items())
        shut = [(way, breaker) for way, breaker in breakers if not breaker.allows(now)]
        dues_s = [breaker.opened_s + breaker.pause_s for _, breaker in shut if breaker.state is State.OPEN]
        return Shut(frozenset(way for way, _ in shut), now, min(dues_s, default=math.inf))

    def _set(self, way: Way, found: Finding) -> None:
        was_broken = self.is_broken(way)
        self._findings[way] = found
        if was_broken or self.is_broken(way):
            self._shut = None

    def sent(self, transfer: str, way: Way, now: float) -> None:
        """``transfer`` is to bring pages over ``way``; through an open breaker it is the probe."""
        if way[0] == way[1]:  # shared memory
            return
        self._under_way[transfer] = Sent(way, now)
        if len(self._under_way) > MAX_UNDER_WAY:
            self._under_way.popitem(last=False)
        if (found := self._findings.get(way)) is not None:
            self._set(way, found._replace(breaker=found.breaker.sent(transfer), tried_s=now))

    def heard(self, event: TransferEvent, now: float) -> None:
        """A store told a milestone: verified bytes, or an end that was the way's fault, tell of the way."""
        sent = self._under_way.get(event.transfer)
        if sent is None:
            return
        way = sent.way
        if event.stage in (Stage.ARRIVED, Stage.SENT):
            del self._under_way[event.transfer]
            self._drop(way)
        elif event.stage is Stage.FAILED and event.unreachable:
            del self._under_way[event.transfer]
            self._failed(sent, event, now)
        elif event.stage is Stage.FAILED and (found := self._findings.get(way)) is not None:
            # The other store may still say that it was the way.
            self._set(way, found._replace(breaker=found.breaker.gave_up(event.transfer, now)))

    def _failed(self, sent: Sent, event: TransferEvent, now: float) -> None:
        """It counts unless it was on its way already when the last one failed that does; the probe always counts."""
        way, found = sent.way, self._findings.get(sent.way)
        if found is None:
            if len(self._findings) >= MAX_BREAKERS:
                return
            found = Finding(Breaker(failures_to_open=BREAKS_TO_OPEN), event.reason, now, -math.inf)
        found = found._replace(why=event.reason, tried_s=now)
        was_broken = self.is_broken(way)
        if sent.at_s >= found.failed_s or event.transfer == found.breaker.probe:
            found = found._replace(breaker=found.breaker.failed(event.transfer, now), failed_s=now)
        self._set(way, found)
        self.opened += self.is_broken(way) and not was_broken

    def expire(self, now: float) -> None:
        """Time passed: probes that nobody tells of, and findings that are old."""
        for way, found in list(self._findings.items()):
            untried_s, breaker = now - found.tried_s, found.breaker
            if untried_s > UNTRIED_S:
                self._drop(way)
            elif breaker.state is State.PROBING and untried_s > PROBE_S:
                self._set(way, found._replace(breaker=breaker.gave_up(breaker.probe, now)))

    def forget(self, store: str) -> None:
        """It was restarted: whatever kept pages from it or in it is over, as far as anybody knows."""
        for way in [way for way in self._findings if store in way]:
            self._drop(way)
        for transfer in [transfer for transfer, sent in self._under_way.items() if store in sent.way]:
            del self._under_way[transfer]

    def keep_only(self, stores: Iterable[str]) -> None:
        """Drop those of stores that nobody knows any more."""
        known = set(stores)
        for way in [way for way in self._findings if not known.issuperset(way)]:
            self._drop(way)

    def _drop(self, way: Way) -> None:
        if self._findings.pop(way, None) is not None:
            self._shut = None
