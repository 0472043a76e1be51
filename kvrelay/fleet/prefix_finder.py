"""Prefixes that are in no worker's reach yet and could be: under way, or in another node's store. It must never offer
one that nobody would wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from kvrelay.fleet.holdings import Depths
from kvrelay.fleet.holds import Holds
from kvrelay.fleet.index import store_name
from kvrelay.fleet.links import Links
from kvrelay.fleet.pulls import Pulls
from kvrelay.fleet.topology import WorkerColumns
from kvrelay.fleet.underway import Underway, Work
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.cost import Coming, Hints, Kind, Offer, Source
from kvrelay.policy.patience import HOLD_S
from kvrelay.types import PageName, PromptNames

MOST_PEERS = 2
"""Stores that a prefix may be pulled from, those with the most of it."""


ENGINE, STORE = Source(Kind.ENGINE), Source(Kind.STORE)


class Peer(NamedTuple):
    """A store that a prefix may be pulled from."""

    source: Source
    row: int
    """Row of the store in ``Links``."""
    pages: int
    """Leading pages that it has."""


class PrefixCandidates(NamedTuple):
    """Where prefixes of one prompt are, and which are under way."""

    depths: Depths
    works: Mapping[PageName, Sequence[tuple[Work, int]]]
    """Work under way that brings a prefix, and how many leading pages it brings, by the root of the names."""
    peers: Mapping[PageName, Sequence[Peer]]
    """Stores that have the longest prefixes of the prompt, by the root of its names."""
    cooling: Collection[tuple[str, str]]
    """Ways between stores that nothing is pulled over."""


class PrefixFinder:
    """Finds the prefixes of a prompt that workers have or could get."""

    def __init__(
        self, fleet: Fleet, links: Links, underway: Underway, holds: Holds, pulls: Pulls, longest_s: float
    ) -> None:
        """``longest_s``: nobody waits longer for a prefix."""
        self._fleet = fleet
        self._links = links
        self._underway = underway
        self._holds = holds
        self._pulls = pulls
        self._longest_s = longest_s

    def __repr__(self) -> str:
        return f"<PrefixFinder of {self._underway!r}, {self._pulls!r}>"

    def look(self, prompt: PromptNames, depths: Depths, now: float, *, may_wait: bool) -> PrefixCandidates:
        """Where ``prompt`` is, which ``depths`` say, and, when it ``may_wait``, where it comes from."""
        if not may_wait:
            return PrefixCandidates(depths, {}, {}, ())
        pulls = len(self._fleet.stores) > 1 and not self._pulls.is_full
        cooling, shut = self._pulls.cooling(now), self._fleet.ways.shut(now)
        return PrefixCandidates(
            depths,
            {root: works for root, names in prompt.items() if (works := self._underway.find(names))},
            {root: self._deepest(by_holder, now) for root, by_holder in depths.items()} if pulls and depths else {},
            cooling | shut if cooling else shut,
        )

    def _deepest(self, by_holder: Mapping[str, int], now: float) -> list[Peer]:
        found: list[Peer] = []
        for holder, pages in sorted(by_holder.items(), key=itemgetter(1), reverse=True):
            name = store_name(holder)
            if name is not None and self._fleet.stores.is_usable(name, now):
                found.append(Peer(Source(Kind.PEER, name), self._links.rows([name])[0], pages))
                if len(found) == MOST_PEERS:
                    break
        return found

    def offers(self, columns: WorkerColumns, candidates: PrefixCandidates, tokens: int, now: float) -> PrefixOffers:
        """What the workers of ``columns`` could have of a prompt of ``tokens``."""
        return PrefixOffers(self._fleet, self._links, self._holds, columns, candidates, tokens, self._longest_s, now)


class PrefixOffers:
    """``cost.Offers`` to the workers of ``WorkerColumns``: each is worked out when it is asked for, which few are."""

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        holds: Holds,
        columns: WorkerColumns,
        candidates: PrefixCandidates,
        tokens: int,
        longest_s: float,
        now: float,
    ) -> None:
        self._fleet = fleet
        self._links = links
        self._holds = holds
        self._columns = columns
        self._candidates = candidates
        self._tokens = tokens
        self._longest_s = longest_s
        self._now = now

    def __repr__(self) -> str:
        return f"<PrefixOffers to {len(self._columns.names)} workers>"

    def hints(self) -> Hints:
        """No worse than the real ones: what is at hand needs no loading, the rest comes the fastest way."""
        columns, candidates = self._columns, self._candidates
        at_hand, stored, coming = [0.0] * len(columns.names), [0] * len(columns.names), list[Coming]()
        for root, members in columns.kinds.items():
            by_holder, page_tokens = candidates.depths.get(root, {}), columns.page_tokens[members[0]]
            there = [by_holder.get(columns.store_keys[at], 0) for at in members] if by_holder else ()
            held = [by_holder.get(columns.names[at], 0) for at in members] if by_holder else ()
            for at, near, own in zip(members, there, held, strict=False):
                stored[at], at_hand[at] = near, page_tokens * (near if near > own else own)
            for work, pages in candidates.works.get(root, ()):
                for at in columns.having(work.worker, work.stores):
                    if columns.roots[at] == root:
                        at_hand[at] = max(at_hand[at], pages * page_tokens)
            coming += self._comes(root, members)
        return Hints(at_hand, stored, coming)

    def _comes(self, root: PageName, members: Sequence[int]) -> Iterator[Coming]:
        columns, quickest = self._columns, self._links.quickest
        page_tokens, page_bytes = columns.page_tokens[members[0]], columns.page_bytes[members[0]]
        for _, _, pages in self._candidates.peers.get(root, ()):
            yield Coming(
                to=members,
                pages=pages,
                tokens=pages * page_tokens,
                first_s=HOLD_S + quickest.latency_s,
                page_s=quickest.s_per_byte * page_bytes,
            )

    def __getitem__(self, at: int, /) -> list[Offer]:
        columns, candidates = self._columns, self._candidates
        root, page_tokens, row = columns.roots[at], columns.page_tokens[at], columns.stores[at]
        by_holder = candidates.depths.get(root, {})
        held, stored = by_holder.get(columns.names[at], 0), by_holder.get(columns.store_keys[at], 0)
        found: list[Offer] = [(ENGINE, held * page_tokens, 0.0)]
        if stored > held:  # else it has no more, and has to be loaded
            found.append((STORE, stored * page_tokens, self._links.restore_s(row, stored * columns.page_bytes[at])))
        own = max(held, stored)
        if at in self._reached or any(peer.pages > own for peer in candidates.peers.get(root, ())):
            found += self._waited_for(at, root, own, stored)
        return found

    @cached_property
    def _reached(self) -> set[int]:
        """Positions of the workers that will have a prefix that is under way."""
        works = [work for each in self._candidates.works.values() for work, _ in each]
        return {at for work in works for at in self._columns.having(work.worker, work.stores)}

    def _waited_for(self, at: int, root: PageName, own: int, stored: int) -> Iterator[Offer]:
        """Prefixes that come soon enough. The prompts that are held back for this worker are added to the time: they
        will be computed when their prefix is there, not while this prompt waits for its own. ``own``: pages at hand."""
        others_s = self._holds.seconds_at(self._columns.names[at]) if self._holds else 0.0
        works = self._works(at, self._candidates.works.get(root, ()))
        for source, length, seconds in chain(works, self._pulls(at, self._candidates.peers.get(root, ()), own, stored)):
            if seconds <= self._longest_s:
                yield source, length, seconds + others_s

    def _works(self, at: int, works: Sequence[tuple[Work, int]]) -> Iterator[Offer]:
        columns = self._columns
        for work, pages in works:
            if (here := columns.names[at] == work.worker) or columns.store_keys[at] in work.stores:
                ready_s = work.remaining_s(pages, self._now) + self._then_s(at, pages, here=here)
                yield Source(Kind.UNDERWAY, work.key), pages * columns.page_tokens[at], ready_s

    def _then_s(self, at: int, pages: int, *, here: bool) -> float:
        """Time from when the pages are in reach until they are in the worker's own cache."""
        columns = self._columns
        if not here:
            return HOLD_S + self._links.restore_s(columns.stores[at], pages * columns.page_bytes[at])
        # An engine that computes prompts one after the other need not be held back for its own.
        return HOLD_S if columns.lets_pass[at] else 0.0

    def _pulls(self, at: int, peers: Sequence[Peer], own: int, stored: int) -> Iterator[Offer]:
        """Prefixes that a peer store could push: longer than ``own`` pages, of which ``stored`` need not travel."""
        columns, (latency_s, s_per_byte, in_flight_bytes) = self._columns, self._links.tables
        page_tokens, page_bytes, to = columns.page_tokens[at], columns.page_bytes[at], columns.stores[at]
        whole = self._tokens // page_tokens
        for source, row, depth in peers:
            pages = min(depth, whole)
            if pages > own and row != to and self._may_push(source.origin, columns.workers[at].store):
                moving_bytes = (pages - min(pages, stored)) * page_bytes + in_flight_bytes[row][to]
                there_s = HOLD_S + latency_s[row][to] + s_per_byte[row][to] * moving_bytes
                yield source, pages * page_tokens, there_s + self._links.restore_s(to, pages * page_bytes)

    def _may_push(self, source: str, target: str) -> bool:
        cools = bool(self._candidates.cooling) and (source, target) in self._candidates.cooling
        return not cools and self._fleet.stores.is_usable(target, self._now)
