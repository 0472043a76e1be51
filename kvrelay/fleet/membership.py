"""Members come, show that they live, tell of their pages, and go. It must never decide what becomes of the requests of
one that went; the brain does."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.holdings import Holdings
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.restores import Restores
from kvrelay.fleet.workers import FORGET_S, Fleet, Roster
from kvrelay.protocol.feed import Heartbeat, PageEvents, PageSnapshot, PagesWanted
from kvrelay.types import StoreInfo, Value, WorkerInfo

Member = WorkerInfo | StoreInfo


class Missing(Value, frozen=True, kw_only=True):
    """Workers that have been silent for too long, by name."""

    silent: tuple[str, ...]
    """Workers whose lease has just run out. Silence is no proof of death."""
    given_up: tuple[str, ...]
    """Workers that have been silent for so long that no request waits for them any more."""


class Membership:
    """Keeps the fleet, and what is known of each member, in step."""

    def __init__(
        self,
        fleet: Fleet,
        index: PageIndex,
        holdings: Holdings,
        loads: Loads,
        experience: Experience,
        breakers: Breakers,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._holdings = holdings
        self._loads = loads
        self._experience = experience
        self._breakers = breakers
        self._restores = Restores(loads.links)
        self._began_s: float | None = None
        """When time passed first."""

    def __repr__(self) -> str:
        return f"<Membership of {self._fleet!r}>"

    # ------------------------------------------------------------ coming

    def register_worker(self, worker: WorkerInfo, now: float) -> bool:
        """A worker says hello; True when a former incarnation of it is dead now. Raises ``Malformed``, ``Refused``."""
        is_reborn = self._fleet.register_worker(worker, now)
        self._experience.join(worker)
        if is_reborn:
            self._breakers.forget(worker.name)
            self._index.drop(worker.name)
        return is_reborn

    def register_store(self, store: StoreInfo, now: float) -> None:
        """A store says hello. Raises ``Malformed``, ``Refused``."""
        if self._fleet.stores.register(store, now):
            self._fleet.ways.forget(store.name)

    def link(self, member: Member, opened: int) -> None:
        """A link over which ``member`` registered is open (1) or has ended (-1)."""
        self._roster(member).link(member.name, member.incarnation, opened)

    # ------------------------------------------------------------ being there

    def heartbeat(self, member: Member, beat: Heartbeat, now: float) -> bool:
        """``member`` is what the link registered as; False when another has its name now."""
        is_current = self._roster(member).hear(
            member.name,
            beat.incarnation,
            healthy=beat.healthy,
            counts=beat.counts,
            now=now,
            ways=beat.links,
            progress=beat.progress,
        )
        if is_current and isinstance(member, StoreInfo):
            self._restores.heard(member, beat.counts)
        return is_current

    def pages_wanted(self, member: Member, now: float) -> PagesWanted:
        """``member`` registered over a new link: what to ask it about its pages."""
        return self._index.open(holder_of(member), member.incarnation, now)

    def pages(self, member: Member, message: PageEvents | PageSnapshot, now: float) -> PagesWanted | None:
        """What ``member`` has; what to ask it for, when something of that is missing."""
        if not self._is_current(member):
            self._index.stale += 1
            return None
        return self._index.take(holder_of(member), member.incarnation, message, now)

    def pages_missing(self, member: Member, now: float) -> PagesWanted | None:
        """``member`` shows that it lives, and may have no news of its pages for long: what to ask it for, when what it
        told was lost."""
        return self._index.wanted(holder_of(member), member.incarnation, now) if self._is_current(member) else None

    def _is_current(self, member: Member) -> bool:
        known = self._roster(member).get(member.name)
        return known is not None and not known.left and known.info.incarnation == member.incarnation

    def _roster(self, member: Member) -> Roster[WorkerInfo] | Roster[StoreInfo]:
        return self._fleet.workers if isinstance(member, WorkerInfo) else self._fleet.stores

    # ------------------------------------------------------------ going

    def leave(self, member: Member) -> bool:
        """A clean goodbye; False when it was not the current incarnation's."""
        has_left = self._roster(member).leave(member.name, member.incarnation)
        if has_left:
            self._index.drop(holder_of(member))
        return has_left

    def expire(self, now: float) -> Missing:
        """Time passed: the workers that are missing now. Pages of silent holders are dropped from the index."""
        silent = [worker.name for worker in self._fleet.workers.expire(now)]
        gone = [*silent, *(holder_of(store) for store in self._fleet.stores.expire(now))]
        for holder in gone:
            self._index.drop(holder)
        self._forget_unknown(now)
        self._index.tick(now)
        given_up = tuple(worker.name for worker in self._fleet.workers.given_up(now))
        return Missing(silent=tuple(silent), given_up=given_up)

    def _forget_unknown(self, now: float) -> None:
        workers: Sequence[str] = [member.info.name for member in self._fleet.workers]
        stores = [member.info.name for member in self._fleet.stores]
        self._loads.keep_only(workers)
        self._began_s = now if self._began_s is None else self._began_s
        if now - self._began_s > FORGET_S:  # what a former router learned is of stores that have yet to dial
            self._loads.links.keep_only([*stores, *(member.info.store for member in self._fleet.workers)])
        self._holdings.keep_only(workers, stores)
        self._fleet.ways.keep_only(stores)
        self._fleet.ways.expire(now)
        self._restores.keep_only(stores)
        self._breakers.keep_only(workers)
        self._experience.keep_only(workers)


def holder_of(member: Member) -> str:
    """Name of a member in the index."""
    return member.name if isinstance(member, WorkerInfo) else store_key(member.name)
