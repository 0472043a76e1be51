"""A node's page store without pages: it knows names, passes hand-offs on and reports them as a real one does.

Names are all that routers hear of a store. It must never say that a page is there before its bytes could be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvrelay.deploy.mock.wire import Later, Wire
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import PushOrder, TransferEvent
from kvrelay.protocol.message import Message
from kvrelay.types import Medium, PageFormat, PageName, Stage, StoreInfo, Transport

MAX_TRANSFERS = 4096
"""Ended ones included: who asks for one that is forgotten waits for nothing."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One hand-off, as the store sees it in which it ends."""

    id: str
    owner: str
    """Incarnation of the worker that computes it."""
    life: str
    """Incarnation of the store."""
    names: tuple[PageName, ...]
    total_tokens: int
    sender: MockStore
    expected: set[PageName]
    outcome: Stage | None = None
    bytes: int = 0
    pages: int = 0
    begun_s: float = 0.0
    moving_s: float = 0.0
    late_bytes: int = 0
    waiting: set[Callable[[], None]] = field(default_factory=set)
    """Called when its pages are here, or will not come."""


class MockStore:
    """Names of pages, the least recently used forgotten first, and hand-offs that end here."""

    def __init__(
        self, info: StoreInfo, form: PageFormat, *, wire: Wire, later: Later, emit: Callable[[Message], None]
    ) -> None:
        """``wire`` brings pages of other stores; ``emit`` takes what routers are to hear."""
        self.info = info
        self.log = PageLog(info.incarnation)
        self._form = form
        self._most_pages = max(1, info.capacity_bytes // form.page_bytes)
        self._wire = wire
        self._later = later
        self._emit = emit
        self._pages: dict[PageName, None] = {}
        self._transfers: dict[str, Transfer] = {}
        self._failed = 0
        self._refused = 0
        self._restored_bytes = 0
        self._restore_s = 0.0
        self.is_away = False
        """Between two lives."""
        self.is_full = False
        """Every slot is in use by somebody else: nothing goes, and nothing more comes."""
        self.is_apart = False
        """No transfer is opened between it and another store; what is on its way arrives."""

    def __repr__(self) -> str:
        return f"<MockStore {self.info.name}, {len(self._pages)} pages, {len(self._transfers)} transfers>"

    def counts(self) -> dict[str, int]:
        """Counts that heartbeats carry, by name."""
        return {
            "pages_used": len(self._pages),
            "transfers_failed": self._failed,
            "pages_refused": self._refused,
            "restored_bytes": self._restored_bytes,
            "restore_us": round(1e6 * self._restore_s),
        }

    def restored(self, size_bytes: int, seconds: float) -> None:
        """A worker has loaded so much of what is here."""
        self._restored_bytes += size_bytes
        self._restore_s += seconds

    # ------------------------------------------------------------ life and death

    def die(self) -> None:
        """All is lost, and nobody is told; who waits for a transfer waits no longer."""
        self.is_away = True
        self._pages.clear()
        self._restored_bytes, self._restore_s = 0, 0.0
        transfers, self._transfers = self._transfers, {}
        for transfer in transfers.values():
            self._end(transfer, Stage.FAILED)

    def revive(self, incarnation: str) -> None:
        """A new life, without a page."""
        self.info = msgspec.structs.replace(self.info, incarnation=incarnation)
        self.log = PageLog(incarnation)
        self.is_away = False

    # ------------------------------------------------------------ pages

    def depth(self, names: Sequence[PageName]) -> int:
        """How many leading pages of ``names`` are here; they count as used now."""
        pages = self._pages
        count = next((count for count, name in enumerate(names) if name not in pages), len(names))
        for name in names[:count]:
            del pages[name]
            pages[name] = None
        return count

    def has(self, name: PageName) -> bool:
        return name in self._pages

    def put(self, names: Iterable[PageName]) -> bool:
        """These pages are whole here, unless there is no room for all that are new: whether they are."""
        if self.is_away:
            return False
        fresh = [name for name in names if name not in self._pages]
        if not fresh:
            return True
        if self.is_full:
            self._refused += len(fresh)
            return False
        self._pages.update(dict.fromkeys(fresh))
        self.log.store(fresh, Medium.MEMORY)
        self._evict(len(self._pages) - self._most_pages)
        return all(map(self.has, fresh))

    def _evict(self, count: int) -> None:
        """The least recently used go: some of those that just came, where a chunk is larger than the store."""
        gone = [name for name, _ in zip(self._pages, range(count), strict=False)]
        for name in gone:
            del self._pages[name]
        if gone:
            self.log.remove(gone, Medium.MEMORY)

    # ------------------------------------------------------------ hand-offs

    def open(
        self, id: str, owner: str, names: Sequence[PageName], total_tokens: int, sender: MockStore, now: float
    ) -> None:
        """The pages of ``names`` will come from ``sender``; those that it has already, at once."""
        if self.is_away or (sender is not self and (self.is_apart or sender.is_apart)):
            sender.unreachable(id, self)
            return
        if id in self._transfers:
            return
        while len(self._transfers) >= MAX_TRANSFERS:
            self._transfers.pop(next(iter(self._transfers)))
        lacking = {name for name in names if name not in self._pages}
        self._transfers[id] = Transfer(
            id, owner, self.info.incarnation, tuple(names), total_tokens, sender, lacking, begun_s=now
        )
        self.saved(id, [name for name in names if sender.has(name)], begun_s=now, now=now)

    def push(self, order: PushOrder, target: MockStore | None, now: float) -> None:
        """A router has the pages of ``order`` that are here pushed to ``target``; None: it is not of this process."""
        here = self.depth(order.names)
        if target is None or not here:
            self.relay(order.transfer, Stage.FAILED, reason="nothing of it is here, or its target is not")
            return
        target.open(order.transfer, self.info.incarnation, order.names[:here], order.total_tokens, self, now)

    def saved(self, id: str, names: Sequence[PageName], *, begun_s: float, now: float) -> None:
        """The sender of a transfer has these pages, and has computed them since ``begun_s``."""
        transfer = self._transfers.get(id)
        if transfer is None or transfer.outcome is not None:
            return
        wanted = [name for name in names if name in transfer.expected]
        if transfer.sender is self or not wanted:
            self._arrived(transfer, wanted, now)
            return
        size = len(wanted) * self._form.page_bytes
        sent = self._wire.send(size, begun_s=begun_s, computed_s=now, layers=self._form.layers)
        transfer.bytes += size
        transfer.pages += len(wanted)
        transfer.moving_s += sent.moving_s
        transfer.late_bytes = sent.late_bytes  # that of the last chunk counts
        self._later(sent.there_s, lambda: self._arrived(transfer, wanted, sent.there_s))

    def _arrived(self, transfer: Transfer, names: Sequence[PageName], now: float) -> None:
        if self.is_away or transfer.life != self.info.incarnation:
            return
        if not self.put(names):
            self.fail(transfer.id, f"store {self.info.name} is full of pages in use")
            return
        transfer.expected.difference_update(names)
        if transfer.expected or transfer.outcome is not None:
            return
        self._end(transfer, Stage.ARRIVED)
        self._emit(
            TransferEvent(
                store=self.info.name,
                transfer=transfer.id,
                stage=Stage.ARRIVED,
                tokens=transfer.total_tokens,
                transport=Transport.TCP if transfer.bytes else Transport.LOCAL,
                bytes=transfer.bytes,
                pages=transfer.pages,
                runs=transfer.pages * self._form.layers,
                seconds=now - transfer.begun_s,
            )
        )
        if transfer.sender is not self:
            transfer.sender.sent(transfer)

    def sent(self, transfer: Transfer) -> None:
        """All of a transfer that ended elsewhere was sent from here."""
        self._emit(
            TransferEvent(
                store=self.info.name,
                transfer=transfer.id,
                stage=Stage.SENT,
                moving_s=transfer.moving_s,
                late_bytes=transfer.late_bytes,
            )
        )

    def may_bring(self, ids: Iterable[str], then: Callable[[], None]) -> bool:
        """Whether one of these transfers is not known yet, or still open; ``then`` is called when an open one ends."""
        pending = False
        for id in () if self.is_away else ids:
            transfer = self._transfers.get(id)
            if transfer is None:
                pending = True
            elif transfer.outcome is None:
                transfer.waiting.add(then)
                pending = True
        return pending

    def fail(self, id: str, reason: str) -> None:
        """No more pages will come for it."""
        transfer = self._transfers.get(id)
        if transfer is not None and transfer.outcome is None:
            self._failed += 1
            self._end(transfer, Stage.FAILED)
            self.relay(id, Stage.FAILED, reason=reason)

    def fail_all(self, owner: str, reason: str) -> None:
        """The worker that computes them is gone."""
        for transfer in [each for each in self._transfers.values() if each.owner == owner]:
            self.fail(transfer.id, reason)

    def fail_from(self, sender: MockStore) -> None:
        """The store from which pages come is gone."""
        for transfer in [each for each in self._transfers.values() if each.sender is sender]:
            self.fail(transfer.id, f"store {sender.info.name} is gone")

    def relay(self, id: str, stage: Stage, *, tokens: int = 0, reason: str = "") -> None:
        """A milestone that needs no more than this, of this node's workers above all; lost between two lives."""
        self._emit(TransferEvent(store=self.info.name, transfer=id, stage=stage, tokens=tokens, reason=reason))

    def unreachable(self, id: str, target: MockStore) -> None:
        """A transfer that begins here cannot get to ``target``."""
        why = f"no store answers at {target.info.address}"
        event = TransferEvent(store=self.info.name, transfer=id, stage=Stage.FAILED, reason=why, unreachable=True)
        self._emit(event)

    def _end(self, transfer: Transfer, outcome: Stage) -> None:
        transfer.outcome, transfer.names, transfer.expected = outcome, (), set()
        waiting, transfer.waiting = transfer.waiting, set()
        for call in waiting:
            call()
