"""Second copies of what running answers would miss: pages that only the node has which writes them. It must never order
more than its share of a link, nor what another node has already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import Flight, PullPages
from kvrelay.fleet.holdings import Holdings, names_for
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.workers import Fleet
from kvrelay.identity import root_of
from kvrelay.policy.place import Budget, Room, Stake, is_worth_it
from kvrelay.protocol.feed import PushOrder, TransferEvent
from kvrelay.types import PageName, PromptNames, Stage, StoreInfo, Value, WorkerInfo

LEAST_PAGES = 4
"""New ones that are worth a message."""
MAX_OPEN = 64
GIVE_UP_S = 30.0
"""A copy of which nothing was heard for so long is forgotten."""


class Copy(Value, frozen=True, kw_only=True):
    """One that is being made."""

    request_id: str
    transfer: str
    source: str
    target: str
    names: tuple[PageName, ...]
    worker: WorkerInfo
    size_bytes: int
    begun_s: float


@dataclass
class Counts:
    """How many copies were begun, and what became of them."""

    begun: int = 0
    made: int = 0
    lost: int = 0
    """Copies that failed before they were whole."""
    declined: int = 0
    """Copies that were not worth their bytes, or over the budget."""
    bytes: int = 0


class Copies:
    """Orders second copies of pages that running answers of one router need."""

    def __init__(
        self,
        fleet: Fleet,
        index: PageIndex,
        holdings: Holdings,
        loads: Loads,
        experience: Experience,
        flights: Mapping[str, Flight],
        share: float,
    ) -> None:
        """``share`` of each link's speed; 0: no copies."""
        self._fleet = fleet
        self._index = index
        self._holdings = holdings
        self._loads = loads
        self._experience = experience
        self._flights = flights
        self._share = share
        self._open: dict[str, Copy] = {}
        self._budgets: dict[tuple[str, str], Budget] = {}
        self.counts = Counts()

    def __repr__(self) -> str:
        return f"<Copies {len(self._open)} open, {self.counts}>"

    @property
    def is_on(self) -> bool:
        return self._share > 0

    @property
    def _links(self) -> Links:
        return self._loads.links

    # ------------------------------------------------------------ what to copy

    def look(self, request_id: str, prompt: PromptNames, tokens: int, now: float) -> list[PullPages]:
        """``prompt`` names all that a running answer has read and written, ``tokens`` tokens; the order for a copy."""
        flight = self._flights.get(request_id)
        member = self._fleet.workers.get(flight.decode.worker) if flight is not None else None
        if flight is None or member is None or len(self._open) >= MAX_OPEN or self._is_busy(request_id):
            return []
        names = names_for(member.info, prompt)[: tokens // member.info.engine.fingerprint.format.page_tokens]
        depths = self._holdings.depths(prompt).get(root_of(member.info.engine.fingerprint), {})
        own = min(len(names), depths.get(store_key(member.info.store), 0))
        others = [(depths.get(store_key(info.name), 0), info) for info in self._others(member.info, now)]
        if not others or own - max(depth for depth, _ in others) < LEAST_PAGES:
            return []
        depth, target = max(others, key=lambda each: (each[0], self._free_share(each[1], member.info)))
        return self._order(flight, member.info, target, names[:own], depth, now)

    def _is_busy(self, request_id: str) -> bool:
        return any(copy.request_id == request_id for copy in self._open.values())

    def _others(self, worker: WorkerInfo, now: float) -> list[StoreInfo]:
        own, allows = worker.store, self._fleet.ways.allows
        return [it for it in self._fleet.stores.usable(now) if it.name != own and allows((own, it.name), now)]

    def _free_share(self, store: StoreInfo, worker: WorkerInfo) -> float:
        used = self._index.count(store_key(store.name)) * worker.engine.fingerprint.format.page_bytes
        return 1.0 - used / store.capacity_bytes

    def _order(
        self, flight: Flight, worker: WorkerInfo, target: StoreInfo, names: tuple[PageName, ...], depth: int, now: float
    ) -> list[PullPages]:
        form, way = worker.engine.fingerprint.format, (worker.store, target.name)
        size_bytes = (len(names) - depth) * form.page_bytes
        stake = self._stake(flight, worker, (len(names) - depth) * form.page_tokens, depth * form.page_tokens)
        copy_s, waiting_s = self._links.seconds(*way, size_bytes), self._links.seconds(*way, 0)
        room = Room(
            free_share=self._free_share(target, worker),
            waiting_s=max(0.0, waiting_s - self._links.move(*way).latency_s),
            copy_s=copy_s,
        )
        budget = self._budget(way)
        if not is_worth_it(stake, room) or not budget.allows(now):
            self.counts.declined += 1
            return []
        self._budgets[way] = budget.spend(size_bytes, now)
        return [self._begin(flight, worker, target, names, size_bytes, now)]

    def _stake(self, flight: Flight, worker: WorkerInfo, tokens: int, past_tokens: int) -> Stake:
        perf = self._experience.perf(worker.name)
        step_s = perf.step_s(self._loads.sequences[worker.name], self._loads.kv_tokens[worker.name])
        left = self._experience.output_tokens(flight.ask.facts.model, flight.ask.facts.max_tokens) / 2
        page = worker.engine.fingerprint.format
        return Stake(
            seconds=perf.prefill_s(tokens, past_tokens),
            bytes=tokens // page.page_tokens * page.page_bytes,
            left_s=left * step_s,
        )

    def _budget(self, way: tuple[str, str]) -> Budget:
        bytes_per_s = self._share / self._links.move(*way).s_per_byte
        known = self._budgets.get(way, Budget(bytes_per_s=bytes_per_s))
        return Budget(bytes_per_s=bytes_per_s, spent_bytes=known.spent_bytes, at_s=known.at_s)

    def _begin(
        self,
        flight: Flight,
        worker: WorkerInfo,
        target: StoreInfo,
        names: tuple[PageName, ...],
        size_bytes: int,
        now: float,
    ) -> PullPages:
        self.counts.begun += 1
        form, transfer = worker.engine.fingerprint.format, f"{flight.request_id}/copy/{self.counts.begun}"
        self._open[transfer] = Copy(
            request_id=flight.request_id,
            transfer=transfer,
            source=worker.store,
            target=target.name,
            names=names,
            worker=worker,
            size_bytes=size_bytes,
            begun_s=now,
        )
        self._links.promise(worker.store, target.name, size_bytes)
        self._fleet.ways.sent(transfer, (worker.store, target.name), now)
        order = PushOrder(
            transfer=transfer,
            names=list(names),
            total_tokens=len(names) * form.page_tokens,
            format=form,
            push_to=target.address,
        )
        return PullPages(request_id=flight.request_id, store=worker.store, order=order)

    # ------------------------------------------------------------ what became of it

    def knows(self, transfer: str) -> bool:
        """Whether its milestones belong here; those of copies that are over, too."""
        return "/copy/" in transfer

    def heard(self, event: TransferEvent) -> None:
        """A store told a milestone of a copy."""
        copy = self._open.get(event.transfer)
        if copy is None or event.stage not in (Stage.ARRIVED, Stage.FAILED):
            return
        if event.stage is Stage.ARRIVED:
            self.counts.made += 1
            self.counts.bytes += event.bytes
            self._holdings.store_has(copy.target, copy.names, copy.worker.engine.fingerprint.format)
        self._end(copy, lost=event.stage is Stage.FAILED)

    def expire(self, now: float) -> None:
        """Forget copies whose stores went away."""
        usable = self._fleet.stores.is_usable
        for copy in list(self._open.values()):
            gone = not usable(copy.source, now) or not usable(copy.target, now)
            if gone or now - copy.begun_s > GIVE_UP_S:
                self._end(copy, lost=True)
        known = {member.info.name for member in self._fleet.stores}
        self._budgets = {way: budget for way, budget in self._budgets.items() if known.issuperset(way)}

    def _end(self, copy: Copy, *, lost: bool) -> None:
        del self._open[copy.transfer]
        self.counts.lost += lost
        self._links.promise(copy.source, copy.target, -copy.size_bytes)

    def moving(self) -> Iterable[tuple[tuple[str, str], int]]:
        """Bytes on each way."""
        return [((copy.source, copy.target), copy.size_bytes) for copy in self._open.values()]
