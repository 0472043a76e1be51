"""What is broken when: a list that follows from a seed. It must never break so much that nobody is left to answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from kvrelay.types import Value

AWAY_SHARE = 0.34
"""Most of the workers of one kind that are broken at a time; of two, one."""


class Deed(StrEnum):
    """A kind of fault that a chaos run injects."""

    KILL = "kill"
    """A process ends without a word; a new one takes its place after a while."""
    STOP = "stop"
    """A process stands still, and goes on after a while."""
    HALF_OPEN = "half-open"
    """A machine is gone and its connections stay as they are; they are reset once it is back."""
    PARTITION = "partition"
    """Nothing comes through for a while, either way; nobody dies, and no connection is closed."""
    LOSS = "loss"
    """Packets are lost, in bursts."""
    CLOCK = "clock"
    """The wall clock jumps by hours, and back."""
    FULL_DISK = "full-disk"
    """A file system has no room left."""
    FULL_ARENA = "full-arena"
    """A store has no slot left: all are in use."""
    SLOW_READER = "slow-reader"
    """A client does not read for a while."""
    CANCEL = "cancel"
    """A client goes away in the middle."""


OF_CLIENTS = (Deed.SLOW_READER, Deed.CANCEL)
"""What is done to clients: any of them, and there is always one."""


class Target(Value, frozen=True, kw_only=True):
    """What can be broken."""

    name: str
    kind: str
    """``prefill``, ``decode``, ``both``, ``store``, ``router``, ``disk`` or ``machine``."""
    deeds: tuple[Deed, ...]


class Event(Value, frozen=True, kw_only=True):
    """One fault of the script: what is done to which target, and when."""

    number: int
    after_s: float
    """Since the one before."""
    deed: Deed
    target: str = ""
    """Empty: any client."""
    lasts_s: float = 0.0


class Script:
    """Events one by one: which target is chosen depends on what is broken at the time, and on nothing but the seed."""

    def __init__(self, targets: Sequence[Target], seed: int, *, every_s: float, lasts_s: tuple[float, float]) -> None:
        """``every_s``: mean time between two; ``lasts_s``: shortest and longest time for which one breaks something."""
        self._targets = list(targets)
        self._random = random.Random(seed)
        self._every_s = every_s
        self._lasts_s = lasts_s
        self._number = 0
        self._now = 0.0
        self._until: dict[str, float] = {}
        able = {deed for target in targets for deed in target.deeds}
        self._deeds = [deed for deed in Deed if deed in able or deed in OF_CLIENTS]

    def __repr__(self) -> str:
        return f"<Script at event {self._number}, {len(self._until)} broken>"

    def next(self) -> Event:
        """The next event."""
        after_s = self._random.expovariate(1 / self._every_s)
        self._now += after_s
        self._number += 1
        self._until = {name: until for name, until in self._until.items() if until > self._now}
        whole = self._whole()
        deed = self._random.choice(self._deeds)
        able = [target for target in whole if deed in target.deeds]
        lasts_s = self._random.uniform(*self._lasts_s)
        if not able:
            told = deed if deed in OF_CLIENTS else Deed.CANCEL
            return Event(number=self._number, after_s=after_s, deed=told, lasts_s=lasts_s)
        target = self._random.choice(able)
        self._until[target.name] = self._now + lasts_s
        return Event(number=self._number, after_s=after_s, deed=deed, target=target.name, lasts_s=lasts_s)

    def _whole(self) -> list[Target]:
        """Targets that may be broken now: enough of their kind stay."""
        kinds = Counter(target.kind for target in self._targets)
        broken = Counter(target.kind for target in self._targets if target.name in self._until)
        return [
            target
            for target in self._targets
            if target.name not in self._until and broken[target.kind] < _most_away(target.kind, kinds[target.kind])
        ]


def _most_away(kind: str, count: int) -> int:
    """How many of a kind may be broken at a time. The only worker is spared; without a store, with a full disk or by
    a wrong clock everything is served all the same."""
    return max(1, int(AWAY_SHARE * count)) if count > 1 or kind in ("store", "disk", "machine") else 0
