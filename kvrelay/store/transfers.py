"""Hand-offs that pass through this store: what each still expects, and the events that routers hear of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvrelay.errors import Barred, KvrelayError
from kvrelay.protocol.feed import TransferEvent
from kvrelay.store.counts import Counts
from kvrelay.store.page import Writer
from kvrelay.store.passage import Passage
from kvrelay.store.traffic import Traffic
from kvrelay.types import PageName, Stage

TRANSFER_TTL_S = 120.0
"""A transfer without news for so long failed; also how long its end is remembered."""
MAX_TRANSFERS = 4096
MAX_REASON_LENGTH = 500
"""Of what somebody else wrote: the rest is cut off, or the event that carries it might be too long for a message."""


class Way(Enum):
    """Where a transfer's pages go, seen from this store."""

    STAY = "stay"
    OUT = "out"
    IN = "in"


@dataclass(slots=True, eq=False)
class Transfer:
    """One hand-off."""

    id: str
    opener: Writer
    """The link that it ends with."""
    names: tuple[PageName, ...]
    total_tokens: int
    way: Way
    expires: float
    expected: set[PageName] = field(default_factory=set)
    """Pages that are not complete here and may still come."""
    unoffered: set[PageName] = field(default_factory=set)
    """Pages that another store has still to offer: they may come from there, whoever else gives them up."""
    gone: set[PageName] = field(default_factory=set)
    """Those of ``unoffered`` that somebody else has given up since they were looked at."""
    is_short: bool = False
    """A page will not come."""
    outcome: Stage | None = None
    traffic: Traffic = field(default_factory=Traffic)
    """What came in for it from another store."""
    let_go: Callable[[], None] = lambda: None
    """Called when it has ended, and when it cannot arrive any more: nothing need be kept for it."""
    tell: Callable[[], None] = lambda: None
    """Called when pages came or were given up, and when it has ended."""

    def __repr__(self) -> str:
        state = self.outcome or f"{len(self.expected)} of {len(self.names)} pages missing"
        return f"<Transfer {self.id} {self.way.value}, {state}>"

    @property
    def is_open(self) -> bool:
        return self.outcome is None

    @property
    def may_arrive(self) -> bool:
        return self.is_open and not self.is_short


class Transfers:
    """All transfers of a store, ended ones for a while."""

    def __init__(
        self,
        store: str,
        counts: Counts,
        emit: Callable[[TransferEvent], None],
        lacking: Callable[[Iterable[PageName]], set[PageName]],
    ) -> None:
        self._store = store
        self._counts = counts
        self._emit = emit
        self._lacking = lacking
        self._transfers: dict[str, Transfer] = {}
        self._awaited: dict[PageName, tuple[Transfer, ...]] = {}
        """Transfers that wait for a page, by its name. They seldom wait for the same one, so that most names of one
        share one tuple."""
        self.on_failed: Callable[[Transfer], None] = lambda transfer: None

    def __repr__(self) -> str:
        return f"<Transfers {self.open_count} open of {len(self._transfers)}>"

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    @property
    def open_count(self) -> int:
        return sum(transfer.is_open for transfer in self._transfers.values())

    def get(self, id: str) -> Transfer | None:
        return self._transfers.get(id)

    def open(
        self, id: str, opener: Writer, names: Iterable[PageName], total_tokens: int, way: Way, now: float
    ) -> Transfer | None:
        """A new transfer; None when the id is known or there are too many."""
        if id in self._transfers or not self._make_room():
            return None
        transfer = Transfer(id, opener, tuple(names), total_tokens, way, now + TRANSFER_TTL_S)
        self._transfers[id] = transfer
        if way is not Way.OUT:
            transfer.expected = self._lacking(transfer.names)
            transfer.unoffered = set(transfer.expected) if way is Way.IN else set()
            self._await(transfer)
            self._settle(transfer, now)
        return transfer

    def relay(self, id: str, stage: Stage, reason: str, tokens: int, now: float, *, unreachable: bool = False) -> None:
        """Pass a worker's milestone on to the routers. ``unreachable``: see ``fail``."""
        self.touch(id, now)
        transfer = self._transfers.get(id)
        if stage is Stage.FAILED and transfer is not None and transfer.is_open:
            self.fail(transfer, reason, now, unreachable=unreachable)
        else:
            self._tell(id, stage, reason, tokens, unreachable=unreachable)

    def not_opened(self, id: str, error: KvrelayError, now: float) -> None:
        """The routers learn why, and whether the way to the other store is at fault."""
        self.relay(id, Stage.FAILED, str(error), 0, now, unreachable=isinstance(error, Barred))

    def touch(self, id: str | None, now: float) -> None:
        """There was news of a transfer."""
        transfer = self._transfers.get(id) if id else None
        if transfer is not None:
            transfer.expires = now + TRANSFER_TTL_S

    def pages_complete(self, names: Sequence[PageName], now: float) -> None:
        """These pages are whole here."""
        waits = dict.fromkeys([self._awaited.pop(name, ()) for name in names])
        for transfer in dict.fromkeys(itertools.chain.from_iterable(waits)):
            transfer.expected.difference_update(names)
            self._settle(transfer, now)
            transfer.tell()

    def page_gone(self, name: PageName, now: float) -> None:
        """A page on its way was given up, and no other copy of it is being made."""
        for transfer in self._awaited.get(name, ()):
            if name in transfer.unoffered:
                transfer.gone.add(name)
                transfer.tell()
            else:
                self.give_up(transfer, (name,), now)

    def offered(self, transfer: Transfer, names: Iterable[PageName]) -> None:
        """Its sender offered these: it sends those that were wanted then, and offers none again."""
        transfer.unoffered.difference_update(names)

    def offers_no_more(self, transfer: Transfer) -> None:
        """Its sender is through."""
        transfer.unoffered.clear()

    def give_up(self, transfer: Transfer, names: Iterable[PageName], now: float) -> None:
        """These pages will not come through ``transfer``."""
        for name in transfer.expected.intersection(names):
            self._forget_wait(transfer, name)
            transfer.expected.discard(name)
            transfer.is_short = True
        if transfer.is_short:
            transfer.let_go()
        self._settle(transfer, now)

    def finish(self, transfer: Transfer, passage: Passage, now: float) -> None:
        """An outgoing transfer sent all that was wanted.

        The routers hear from the other side when it is all there.
        """
        if transfer.is_open:
            transfer.outcome = Stage.SENT
            self._close(transfer, now)
            self._emit(
                TransferEvent(
                    store=self._store,
                    transfer=transfer.id,
                    stage=Stage.SENT,
                    moving_s=passage.moving_s,
                    late_bytes=passage.late_bytes,
                    retries=passage.retries,
                )
            )

    def fail(self, transfer: Transfer, reason: str, now: float, *, unreachable: bool = False) -> None:
        """No more pages will come or go; what arrived is valid. ``unreachable``: the way to the other store is at
        fault."""
        if not transfer.is_open:
            return
        transfer.outcome = Stage.FAILED
        self._counts.add("transfers_failed")
        self._close(transfer, now)
        self._tell(transfer.id, Stage.FAILED, reason, unreachable=unreachable)
        self.on_failed(transfer)

    def _tell(self, id: str, stage: Stage, reason: str, tokens: int = 0, *, unreachable: bool) -> None:
        """Tell the routers of a milestone, with as much of its ``reason`` as an event may have."""
        self._emit(
            TransferEvent(
                store=self._store,
                transfer=id,
                stage=stage,
                reason=reason[:MAX_REASON_LENGTH],
                tokens=tokens,
                unreachable=unreachable,
            )
        )

    def fail_all(self, opener: Writer, now: float) -> None:
        """The link that opened these is gone."""
        for transfer in [t for t in self._transfers.values() if t.is_open and t.opener is opener]:
            self.fail(transfer, f"{opener.label} is gone", now)

    def expire(self, now: float) -> None:
        for transfer in [t for t in self._transfers.values() if t.expires <= now]:
            if transfer.is_open:
                self.fail(transfer, f"no news for {TRANSFER_TTL_S:g} s", now)
            else:
                del self._transfers[transfer.id]

    def may_bring(self, ids: Iterable[str], missing: Iterable[PageName]) -> bool:
        """Whether one of the transfers is not known yet, or alive and expecting one of the ``missing`` pages."""
        for id in ids:
            transfer = self._transfers.get(id)
            if transfer is None or (transfer.is_open and not transfer.expected.isdisjoint(missing)):
                return True
        return False

    def _settle(self, transfer: Transfer, now: float) -> None:
        if not transfer.is_open or transfer.expected:
            return
        if transfer.is_short:
            self.fail(transfer, "some pages did not come: no room, or damaged", now)
            return
        transfer.outcome = Stage.ARRIVED
        traffic = transfer.traffic
        self._counts.add("transfers_arrived")
        self._close(transfer, now)
        self._emit(
            TransferEvent(
                store=self._store,
                transfer=transfer.id,
                stage=Stage.ARRIVED,
                tokens=transfer.total_tokens,
                transport=traffic.transport,
                bytes=traffic.bytes,
                pages=traffic.pages,
                runs=traffic.runs,
                seconds=traffic.duration_s(now),
            )
        )

    def _close(self, transfer: Transfer, now: float) -> None:
        for name in transfer.expected:
            self._forget_wait(transfer, name)
        transfer.expected, transfer.unoffered, transfer.gone, transfer.names = set(), set(), set(), ()
        transfer.expires = now + TRANSFER_TTL_S
        transfer.let_go()
        transfer.tell()
        transfer.let_go = transfer.tell = lambda: None  # it is remembered longer than what it passed through

    def _await(self, transfer: Transfer) -> None:
        alone = (transfer,)
        shared = transfer.expected & self._awaited.keys()
        self._awaited.update(dict.fromkeys(transfer.expected - shared, alone))
        for name in shared:
            self._awaited[name] += alone

    def _forget_wait(self, transfer: Transfer, name: PageName) -> None:
        others = tuple(other for other in self._awaited.pop(name, ()) if other is not transfer)
        if others:
            self._awaited[name] = others

    def _make_room(self) -> bool:
        if len(self._transfers) < MAX_TRANSFERS:
            return True
        ended = next((transfer for transfer in self._transfers.values() if not transfer.is_open), None)
        if ended is None:
            return False
        del self._transfers[ended.id]
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError unless every wait belongs to an open transfer, and the other way round."""
        waits = {(transfer, name) for name, waiting in self._awaited.items() for transfer in waiting}
        expected = {(transfer, name) for transfer in self._transfers.values() for name in transfer.expected}
        assert waits == expected, "waits and transfers differ"
        assert all(transfer.is_open for transfer, _ in waits), "an ended transfer still waits"
