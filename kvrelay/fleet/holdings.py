"""Who holds how much of a prompt: engines in their HBM, stores in memory beside them. It must never be taken for proof:
it is a guess from what was sent where, worth its seconds in a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvrelay.fleet.ground import Place
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.workers import Fleet
from kvrelay.identity import root_of
from kvrelay.policy.cost import Kind, Source, Sources
from kvrelay.policy.fit import Floats
from kvrelay.types import PageName, PromptNames, StoreInfo, WorkerInfo

Depths = Mapping[PageName, Mapping[str, int]]
"""By root: leading pages of a prompt that each holder has; stores by ``store_key``."""

HELD = (Source(Kind.ENGINE), Source(Kind.STORE))


class Holdings:
    """The index, asked and told in terms of workers and their stores."""

    def __init__(self, fleet: Fleet, index: PageIndex, links: Links) -> None:
        self._fleet = fleet
        self._index = index
        self._links = links

    def __repr__(self) -> str:
        return f"<Holdings in {self._index!r}>"

    def engine_got(self, worker: WorkerInfo, prompt: PromptNames) -> None:
        """``worker`` computes or loads a prompt."""
        engine, names = worker.engine, names_for(worker, prompt)
        self._index.add(
            worker.name, worker.incarnation, names, engine.kv_tokens // engine.fingerprint.format.page_tokens
        )

    def store_got(self, worker: WorkerInfo, prompt: PromptNames) -> None:
        """The store beside ``worker`` has all pages of a prompt."""
        store = self._store(worker)
        if store is not None:
            limit = store.capacity_bytes // worker.engine.fingerprint.format.page_bytes
            self._index.add(store_key(store.name), store.incarnation, names_for(worker, prompt), limit)

    def keep_only(self, workers: Sequence[str], stores: Sequence[str]) -> None:
        """Forget what those who are not known any more held."""
        self._index.keep_only([*workers, *map(store_key, stores)])

    def depths(self, prompt: PromptNames) -> Depths:
        """How much of a prompt is where, under each of its names."""
        return {root: self._index.depths(names) for root, names in prompt.items() if names}

    def sources(self, place: Place, depths: Depths) -> Sources:
        """What each worker's engine holds of the prompt, and what it could load from its node's store."""
        if not any(depths.values()) or not place.workers:
            nothing = np.zeros((len(HELD), len(place.workers)))
            return Sources(HELD, nothing, nothing)
        held = pages_at(place.names, place.roots, depths)
        stored = pages_at(place.store_keys, place.roots, depths)
        restore_s = self._links.restore_s(place.stores, stored * place.page_bytes)
        tokens = np.stack([held, stored]) * place.page_tokens
        return Sources(HELD, tokens, np.stack([np.zeros_like(restore_s), restore_s]))

    def _store(self, worker: WorkerInfo) -> StoreInfo | None:
        member = self._fleet.stores.get(worker.store)
        return member.info if member is not None and not member.left else None


def names_for(worker: WorkerInfo, prompt: PromptNames) -> tuple[PageName, ...]:
    """What ``worker`` calls the pages of ``prompt``; nothing when its kind was not asked about."""
    return prompt.get(root_of(worker.engine.fingerprint), ())


def pages_at(holders: Sequence[str], roots: Sequence[PageName], depths: Depths) -> Floats:
    """``[holder]``: leading pages that each has, under the names of its root."""
    nowhere: Mapping[str, int] = {}
    pairs = zip(holders, roots, strict=True)
    return np.array([depths.get(root, nowhere).get(holder, 0) for holder, root in pairs], dtype=np.float64)


def stored_tokens(reading: Place, writing: Place, depths: Depths) -> Floats:
    """``[reader][writer]``: prefix in the reader's kind of pages that the writer's node has."""
    if not reading.names or not any(depths.values()):
        return np.zeros((len(reading.names), len(writing.names)))
    kinds = list(dict.fromkeys(reading.roots))
    rows = np.array([pages_at(writing.store_keys, [kind] * len(writing.names), depths) for kind in kinds])
    by_reader = rows[[kinds.index(root) for root in reading.roots]]
    return np.asarray(by_reader * reading.page_tokens[:, np.newaxis])
