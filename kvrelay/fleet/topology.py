"""The workers of one model as columns: their roles, their stores, and which pairs can hand over. It is kept until a
member comes or goes, since comparing all pairs takes longer than choosing one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.index import store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.ways import Way
from kvrelay.fleet.workers import Fleet, Handoff
from kvrelay.identity import root_of
from kvrelay.policy.patience import beside_answers
from kvrelay.types import Engine, Fingerprint, PageName, StoreInfo, WorkerInfo

MAX_NAMINGS = 4
"""Ways to name pages that are asked about for each prompt: naming 10k tokens takes 0.28 ms. Workers of further kinds
are believed to hold nothing."""


@dataclass(frozen=True)
class WorkerColumns:
    """The prefill workers or the decode workers of one model: a column for each fact, a position for each worker."""

    workers: tuple[WorkerInfo, ...]
    names: tuple[str, ...]
    kv_tokens: tuple[int, ...]
    """Capacity of each."""
    lets_pass: tuple[bool, ...]
    """Whether long prompts there stand back for much shorter ones."""
    chunk_tokens: tuple[int, ...]
    """``chunk_tokens`` of each."""
    stores: tuple[int, ...]
    """Rows of ``Links``."""
    store_keys: tuple[str, ...]
    """Names of their stores in the index."""
    roots: tuple[PageName, ...]
    """How each names its pages: ``identity.root_of``."""
    kinds: Mapping[PageName, list[int]]
    """Positions of those that name pages so, by root."""
    page_tokens: tuple[int, ...]
    page_bytes: tuple[int, ...]
    token_bytes: tuple[int, ...]
    """Sizes of each one's pages, and KV of one token."""
    context_tokens: tuple[int, ...]
    """Most tokens of a prompt and its answer that each takes."""

    @cached_property
    def _least_context_tokens(self) -> int:
        return min(self.context_tokens, default=0)

    def taking(self, tokens: int, at_most: float = math.inf) -> Sequence[int]:
        """Positions of those that take a prompt and its answer of so many ``tokens``, and none of more than
        ``at_most``."""
        if tokens <= self._least_context_tokens and at_most == math.inf:  # nearly always
            return range(len(self.names))
        return [at for at, most in enumerate(self.context_tokens) if tokens <= most <= at_most]

    def most_below(self, tokens: int) -> int:
        """Longest context among the workers that do not take so many ``tokens``; 0: all do."""
        return max((most for most in self.context_tokens if most < tokens), default=0)

    @cached_property
    def _holders(self) -> dict[str, list[int]]:
        """Positions of each worker, and of those beside each store, by their names in the index."""
        found: dict[str, list[int]] = {}
        for at, holders in enumerate(zip(self.names, self.store_keys, strict=True)):
            for holder in holders:
                found.setdefault(holder, []).append(at)
        return found

    def having(self, worker: str | None, stores: Iterable[str]) -> Iterator[int]:
        """Positions of those that have what ``worker`` or one of ``stores`` has."""
        for holder in (worker, *stores) if worker is not None else stores:
            yield from self._holders.get(holder, ())


@dataclass(frozen=True)
class Topology:
    """The prefill workers and the decode workers of one model; a worker of both roles is in both."""

    prefill_workers: tuple[WorkerInfo, ...]
    decode_workers: tuple[WorkerInfo, ...]
    pairs: tuple[tuple[bool, ...], ...]
    """``[prefill][decode]``: whether that prefill worker can hand over to that decode worker."""
    alone: tuple[int, ...]
    """Positions of the decode workers to which no prefill worker can hand over."""
    near: tuple[bool, ...]
    """For each prefill worker: whether a decode worker shares its store."""
    prefill_columns: WorkerColumns
    decode_columns: WorkerColumns
    namings: Mapping[PageName, Fingerprint]
    """One worker's fingerprint for each root, of those that most workers share."""

    def alone_but_for(self, prefills: Sequence[int]) -> Sequence[int]:
        """Positions of the decode workers to which none of the prefill workers at ``prefills`` can hand over."""
        if len(prefills) == len(self.prefill_workers):
            return self.alone
        return [
            at for at in range(len(self.decode_workers)) if not any(self.pairs[prefill][at] for prefill in prefills)
        ]


class Seen(NamedTuple):
    """The members and broken ways from which a topology was made."""

    ready: tuple[WorkerInfo, ...]
    """Usable workers of all models."""
    stores: tuple[StoreInfo, ...]
    workers: list[WorkerInfo]
    """Usable workers of this model whose breakers let requests through."""
    all_well: bool
    """No worker of any model has failed since it last succeeded: no breaker can be open."""
    shut: frozenset[Way]
    """Ways between stores that nothing may be sent over."""

    def shows(self, ready: tuple[WorkerInfo, ...], stores: tuple[StoreInfo, ...], shut: frozenset[Way]) -> bool:
        """Whether no member came or went since and no breaker can be open, so that the topology is still the same."""
        return self.all_well and self.ready is ready and self.stores is stores and self.shut is shut

    def is_like(self, other: Seen) -> bool:
        """Whether the same topology is made of it. Infos are compared by identity first, so this takes microseconds."""
        same_stores = _names(self.stores) == _names(other.stores)
        return self.workers == other.workers and same_stores and self.shut == other.shut


class Topologies:
    """The present topology of every model, made again when a member comes or goes."""

    def __init__(self, fleet: Fleet, links: Links, breakers: Breakers) -> None:
        self._fleet = fleet
        self._breakers = breakers
        self._links = links
        self._kept: dict[str, tuple[Seen, Topology]] = {}

    def __repr__(self) -> str:
        return f"<Topologies of {', '.join(sorted(self._kept)) or 'no model'}>"

    def of(self, model: str, now: float) -> Topology:
        """The topology of all usable workers of ``model`` whose breakers let a request through."""
        ready, stores = self._fleet.workers.usable(now), self._fleet.stores.usable(now)
        all_well, known, shut = not self._breakers, self._kept.get(model), self._fleet.ways.shut(now)
        if known is not None and all_well and known[0].shows(ready, stores, shut):
            return known[1]
        allowed = self._breakers.allows
        workers = [worker for worker in ready if worker.model == model and allowed(worker.name, now)]
        seen = Seen(ready, stores, workers, all_well, shut)
        topology = known[1] if known is not None and seen.is_like(known[0]) else self._survey(workers, now)
        self._kept[model] = seen, topology
        return topology

    def _survey(self, workers: Sequence[WorkerInfo], now: float) -> Topology:
        prefill_workers = tuple(worker for worker in workers if worker.role.prefills)
        decode_workers = tuple(worker for worker in workers if worker.role.decodes)
        ways = [[self._fleet.pair(prefill, decode, now) for decode in decode_workers] for prefill in prefill_workers]
        understood = [
            any(isinstance(way, Handoff) and not way.converts for way in each) for each in zip(*ways, strict=True)
        ]
        # A pair that converts is allowed only for a decode worker that no prefill worker can hand over to without.
        pairs = tuple(
            tuple(
                isinstance(way, Handoff) and not (way.converts and without)
                for way, without in zip(row, understood, strict=True)
            )
            for row in ways
        )
        stores = {decode.store for decode in decode_workers}
        return Topology(
            prefill_workers=prefill_workers,
            decode_workers=decode_workers,
            pairs=pairs,
            alone=tuple(at for at in range(len(decode_workers)) if not any(row[at] for row in pairs)),
            near=tuple(prefill.store in stores for prefill in prefill_workers),
            prefill_columns=self._columns(prefill_workers),
            decode_columns=self._columns(decode_workers),
            namings=_namings(workers),
        )

    def _columns(self, workers: tuple[WorkerInfo, ...]) -> WorkerColumns:
        stores = [worker.store for worker in workers]
        formats = [worker.engine.fingerprint.format for worker in workers]
        roots = tuple(root_of(worker.engine.fingerprint) for worker in workers)
        return WorkerColumns(
            workers=workers,
            names=tuple(worker.name for worker in workers),
            kv_tokens=tuple(worker.engine.kv_tokens for worker in workers),
            lets_pass=tuple(worker.engine.lets_pass for worker in workers),
            chunk_tokens=tuple(chunk_tokens(worker.engine) for worker in workers),
            stores=self._links.rows(stores),
            store_keys=tuple(map(store_key, stores)),
            roots=roots,
            kinds={root: [at for at, each in enumerate(roots) if each == root] for root in dict.fromkeys(roots)},
            page_tokens=tuple(each.page_tokens for each in formats),
            page_bytes=tuple(each.page_bytes for each in formats),
            token_bytes=tuple(each.layers * each.token_layer_bytes for each in formats),
            context_tokens=tuple(worker.engine.max_model_len for worker in workers),
        )

    def keep_only(self, models: Sequence[str]) -> None:
        """Forget models that nobody serves any more."""
        for model in self._kept.keys() - set(models):
            del self._kept[model]


def chunk_tokens(engine: Engine) -> int:
    """Most tokens of one prompt that it computes in a step in which it also writes answers."""
    return beside_answers(engine.shared_chunk_tokens) if engine.lets_pass else engine.max_batched_tokens


def _names(stores: tuple[StoreInfo, ...]) -> list[str]:
    return [store.name for store in stores]


def _namings(workers: Sequence[WorkerInfo]) -> dict[PageName, Fingerprint]:
    prints = [worker.engine.fingerprint for worker in workers]
    common = Counter(map(root_of, prints)).most_common(MAX_NAMINGS)
    known = {root_of(fingerprint): fingerprint for fingerprint in prints}
    return {root: known[root] for root, _ in common}
