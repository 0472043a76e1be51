"""Who holds how much of a prompt: engines in their HBM, stores in memory beside them. It must never be taken for proof:
it is a guess from what was sent where, worth its seconds in a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.topology import WorkerColumns
from kvrelay.fleet.workers import Fleet
from kvrelay.identity import root_of
from kvrelay.types import PageFormat, PageName, PromptNames, StoreInfo, WorkerInfo

Depths = Mapping[PageName, Mapping[str, int]]
"""Leading pages of a prompt that each holder has, by root; stores by ``store_key``."""


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
        self.store_has(worker.store, names_for(worker, prompt), worker.engine.fingerprint.format)

    def store_has(self, store: str, names: Sequence[PageName], form: PageFormat) -> None:
        """``store`` has these pages of ``form``."""
        member = self._fleet.stores.get(store)
        if member is not None and not member.left:
            limit = member.info.capacity_bytes // form.page_bytes
            self._index.add(store_key(store), member.info.incarnation, names, limit)

    def stored(self, worker: WorkerInfo, names: Sequence[PageName]) -> int:
        """How many leading pages of ``names`` the store beside ``worker`` has."""
        store = self._store(worker)
        return self._index.prefix(store_key(store.name), store.incarnation, names) if store is not None else 0

    def keep_only(self, workers: Sequence[str], stores: Sequence[str]) -> None:
        """Forget the holdings of members that are not known any more."""
        self._index.keep_only([*workers, *map(store_key, stores)])

    def depths(self, prompt: PromptNames) -> Depths:
        """How much of a prompt is where, under each of its names."""
        return {root: self._index.depths(names) for root, names in prompt.items() if names}

    def _store(self, worker: WorkerInfo) -> StoreInfo | None:
        member = self._fleet.stores.get(worker.store)
        return member.info if member is not None and not member.left else None


def names_for(worker: WorkerInfo, prompt: PromptNames) -> tuple[PageName, ...]:
    """What ``worker`` calls the pages of ``prompt``; nothing when its kind was not asked about."""
    return prompt.get(root_of(worker.engine.fingerprint), ())


def stored_tokens(prefills: WorkerColumns, decodes: WorkerColumns, depths: Depths) -> list[list[float]]:
    """``[prefill][decode]``: prefix in P's kind of pages that D's node has, in tokens."""
    rows: dict[PageName, list[float]] = {}
    for root, members in prefills.kinds.items():
        pages, tokens = depths.get(root, {}), prefills.page_tokens[members[0]]
        rows[root] = [float(pages.get(key, 0) * tokens) for key in decodes.store_keys]
    return [rows[root] for root in prefills.roots]
