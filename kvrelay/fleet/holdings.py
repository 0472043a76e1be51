"""Who holds how much of a prompt: engines in their HBM, stores in memory beside them. It must never be taken for proof:
it is a guess from what was sent where, worth its seconds in a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvrelay.fleet.ground import Place
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.cost import Source
from kvrelay.types import PageName, StoreInfo, WorkerInfo


class Holdings:
    """The index, asked and told in terms of workers and their stores."""

    def __init__(self, fleet: Fleet, index: PageIndex, links: Links) -> None:
        self._fleet = fleet
        self._index = index
        self._links = links

    def __repr__(self) -> str:
        return f"<Holdings in {self._index!r}>"

    def engine_got(self, worker: WorkerInfo, names: Sequence[PageName]) -> None:
        """``worker`` computes or loads a prompt."""
        engine = worker.engine
        self._index.add(
            worker.name, worker.incarnation, names, engine.kv_tokens // engine.fingerprint.format.page_tokens
        )

    def store_got(self, worker: WorkerInfo, names: Sequence[PageName]) -> None:
        """The store beside ``worker`` has all pages of a prompt."""
        store = self._store(worker)
        if store is not None:
            limit = store.capacity_bytes // worker.engine.fingerprint.format.page_bytes
            self._index.add(store_key(store.name), store.incarnation, names, limit)

    def keep_only(self, workers: Sequence[str], stores: Sequence[str]) -> None:
        """Forget what those who are not known any more held."""
        self._index.keep_only([*workers, *map(store_key, stores)])

    def depths(self, names: Sequence[PageName]) -> dict[str, int]:
        """Leading pages of a prompt that each holder has; stores by ``store_key``."""
        return self._index.depths(names) if names else {}

    def sources(self, place: Place, depths: Mapping[str, int]) -> tuple[Source, Source]:
        """What each worker's engine holds of the prompt, and what it could load from its node's store."""
        workers, nothing = place.workers, np.zeros(len(place.workers))
        if not depths or not workers:
            return Source("engine", nothing, nothing), Source("store", nothing, nothing)
        page = workers[0].engine.fingerprint.format
        held = np.array([depths.get(worker.name, 0) for worker in workers], dtype=np.float64)
        stored = np.array([depths.get(key, 0) for key in place.store_keys], dtype=np.float64)
        restore_s = self._links.restore_s(place.stores, stored * page.page_bytes)
        return Source("engine", held * page.page_tokens, nothing), Source("store", stored * page.page_tokens, restore_s)

    def _store(self, worker: WorkerInfo) -> StoreInfo | None:
        member = self._fleet.stores.get(worker.store)
        return member.info if member is not None and not member.left else None
