"""One registered worker or store, as it was heard last. It must never count as usable what only was heard once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrelay.protocol.client import LinkReport
from kvrelay.types import Drain, StoreInfo, WorkerInfo

STALLED_S = 10.0
"""How long a worker that made no progress gets no work, unless it shows some. Then it is tried again: idle workers show
none either."""

Info = TypeVar("Info", WorkerInfo, StoreInfo)


@dataclass
class Member(Generic[Info]):
    """One registered worker or store."""

    info: Info
    heard_s: float
    well_s: float
    """When it last said that it is healthy."""
    links: int = 0
    """Open links over which it registered: while one is open, its silence may be a pause and not its end."""
    cut: bool = False
    """The last of them has ended, and none was opened since."""
    healthy: bool = True
    progress: int | None = None
    progress_s: float = 0.0
    """When ``progress`` last changed; for a member that reports none, when it was last heard."""
    stalled_s: float | None = None
    """When it was found to make no progress with work that it had."""
    left: bool = False
    lost: bool = False
    """Its silence was noticed, and its requests were moved."""
    drain: Drain = field(default_factory=Drain)
    """The newest order that is known: while it drains, it finishes what it has and gets no new work."""
    told_drain: int = 0
    """Number of the order that it said to have."""
    counts: dict[str, int] = field(default_factory=dict)
    ways: tuple[LinkReport, ...] = ()
    """A store's ways to its peers, as it last told."""

    @property
    def draining(self) -> bool:
        return self.drain.draining

    def order_drain(self, draining: bool) -> None:
        """It is to become empty, or to get work again."""
        if draining != self.draining:
            self.drain = Drain(number=self.drain.number + 1, draining=draining)

    def heard_drain(self, told: Drain) -> None:
        """It says what it was told last. That counts, unless a newer order has yet to reach it."""
        self.told_drain = told.number
        if told.number >= self.drain.number:
            self.drain = told

    def alive(self, now: float, dead_after_s: float) -> bool:
        return not self.left and now - self.heard_s <= dead_after_s

    def usable(self, now: float, dead_after_s: float) -> bool:
        stalled = self.stalled_s is not None and now - self.stalled_s <= STALLED_S
        return self.healthy and not stalled and not self.draining and self.alive(now, dead_after_s)

    def made_progress(self, progress: int | None, now: float) -> None:
        """A heartbeat told how far it is."""
        if progress is None or progress != self.progress:
            self.progress, self.progress_s, self.stalled_s = progress, now, None
