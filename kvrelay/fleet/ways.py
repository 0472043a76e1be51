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

FAILURES_TO_OPEN = 3
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
    """One transfer."""

    way: Way
    at_s: float


class Shut(NamedTuple):
    """Ways over which nothing may be sent, from one moment to another unless something changes."""

    ways: frozenset[Way]
    since_s: float
    until_s: float


class Ways:
    """Of all pairs of stores, as one router hears of them."""

    def __init__(self) -> None:
        self._breakers: dict[Way, Breaker] = {}
        """Of ways over which nothing got through since a failure; all others are well."""
        self._why: dict[Way, str] = {}
        self._under_way: OrderedDict[str, Sent] = OrderedDict()
        """Transfers of which no end was heard; they may outlast their requests."""
        self._tried_s: dict[Way, float] = {}
        """When something was sent over each of these, or failed to get through, for the last time."""
        self._failed_s: dict[Way, float] = {}
        """When the last failure of each of these came that counts."""
        self._shut: Shut | None = None
        self.opened = 0
        """How often one was found broken that had been thought well."""

    def __repr__(self) -> str:
        broken = ", ".join(">".join(way) for way, _ in self._open())
        return f"<Ways broken: {broken or 'none'}>"

    def __len__(self) -> int:
        """Ways that are broken."""
        return len(self._open())

    def _open(self) -> list[tuple[Way, Breaker]]:
        return [(way, breaker) for way, breaker in self._breakers.items() if breaker.state is not State.CLOSED]

    def broken(self) -> list[BrokenWay]:
        """Those that nothing is sent over, or a probe alone; not all where there are very many."""
        return [
            BrokenWay(
                source=way[0],
                target=way[1],
                state=breaker.state.value,
                failures=breaker.failures,
                why=self._why[way],
            )
            for way, breaker in islice(self._open(), MAX_TOLD)
        ]

    def is_broken(self, way: Way) -> bool:
        """Whether nothing got through since it was found broken, a probe that is due or not."""
        return way in self._breakers and self._breakers[way].state is not State.CLOSED

    def allows(self, way: Way, now: float) -> bool:
        """Whether pages may be sent over it now."""
        breaker = self._breakers.get(way)
        return breaker is None or breaker.allows(now)

    def shut(self, now: float) -> frozenset[Way]:
        """Those over which nothing may be sent now."""
        if not self._breakers:
            return _NONE
        if self._shut is None or not self._shut.since_s <= now < self._shut.until_s:
            self._shut = self._look(now)
        return self._shut.ways

    def _look(self, now: float) -> Shut:
        shut = [(way, breaker) for way, breaker in self._breakers.items() if not breaker.allows(now)]
        dues_s = [breaker.opened_s + breaker.pause_s for _, breaker in shut if breaker.state is State.OPEN]
        return Shut(frozenset(way for way, _ in shut), now, min(dues_s, default=math.inf))

    def _set(self, way: Way, breaker: Breaker) -> None:
        before = self._breakers.get(way)
        self._breakers[way] = breaker
        if breaker.state is not State.CLOSED or (before is not None and before.state is not State.CLOSED):
            self._shut = None

    def sent(self, transfer: str, way: Way, now: float) -> None:
        """``transfer`` is to bring pages over ``way``; through an open breaker it is the probe."""
        if way[0] == way[1]:  # shared memory
            return
        self._under_way[transfer] = Sent(way, now)
        if len(self._under_way) > MAX_UNDER_WAY:
            self._under_way.popitem(last=False)
        if way in self._breakers:
            self._set(way, self._breakers[way].sent(transfer))
            self._tried_s[way] = now

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
        elif event.stage is Stage.FAILED and way in self._breakers:  # the other store may still say that it was the way
            self._set(way, self._breakers[way].gave_up(event.transfer, now))

    def _failed(self, sent: Sent, event: TransferEvent, now: float) -> None:
        """It counts unless it was on its way already when the last one failed that does."""
        way, before = sent.way, self._breakers.get(sent.way)
        if before is None and len(self._breakers) >= MAX_BREAKERS:
            return
        self._why[way], self._tried_s[way] = event.reason, now
        if sent.at_s < self._failed_s.get(way, -math.inf):
            return
        self._failed_s[way] = now
        after = (before or Breaker(failures_to_open=FAILURES_TO_OPEN)).failed(event.transfer, now)
        self._set(way, after)
        self.opened += after.state is State.OPEN and (before is None or before.state is State.CLOSED)

    def expire(self, now: float) -> None:
        """Time passed: probes that nobody tells of, and findings that are old."""
        for way, breaker in list(self._breakers.items()):
            untried_s = now - self._tried_s[way]
            if untried_s > UNTRIED_S:
                self._drop(way)
            elif breaker.state is State.PROBING and untried_s > PROBE_S:
                self._set(way, breaker.gave_up(breaker.probe, now))

    def forget(self, store: str) -> None:
        """It was restarted: whatever kept pages from it or in it is over, as far as anybody knows."""
        for way in [way for way in self._breakers if store in way]:
            self._drop(way)
        for transfer in [transfer for transfer, sent in self._under_way.items() if store in sent.way]:
            del self._under_way[transfer]

    def keep_only(self, stores: Iterable[str]) -> None:
        """Drop those of stores that nobody knows any more."""
        known = set(stores)
        for way in [way for way in self._breakers if not known.issuperset(way)]:
            self._drop(way)

    def _drop(self, way: Way) -> None:
        if self._breakers.pop(way, None) is not None:
            self._shut = None
        self._failed_s.pop(way, None)
        self._why.pop(way, None)
        self._tried_s.pop(way, None)
