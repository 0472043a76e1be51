"""Prefixes that are in no worker's reach yet and could be: under way, or in another node's store. It must never offer
one that nobody would wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from kvrelay.fleet.ground import Place
from kvrelay.fleet.holdings import Depths
from kvrelay.fleet.holds import Holds
from kvrelay.fleet.index import store_name
from kvrelay.fleet.links import Links
from kvrelay.fleet.pulls import Pulls
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
    """Of ``Links``."""
    pages: int
    """Leading pages that it has."""


class Sight(NamedTuple):
    """What there is of one prompt, by the root of its names."""

    depths: Depths
    works: Mapping[PageName, Sequence[tuple[Work, int]]]
    """Under way, and how many leading pages each brings."""
    peers: Mapping[PageName, Sequence[Peer]]
    """Those with the most of it."""
    cooling: Collection[tuple[str, str]]
    """Ways between stores that nothing is pulled over."""


class Reach:
    """Finds what workers could have of a prompt."""

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
        return f"<Reach of {self._underway!r}, {self._pulls!r}>"

    def look(self, prompt: PromptNames, depths: Depths, now: float, *, may_wait: bool) -> Sight:
        """Where ``prompt`` is, which ``depths`` say, and, when it ``may_wait``, where it comes from."""
        if not may_wait:
            return Sight(depths, {}, {}, ())
        pulls = len(self._fleet.stores) > 1 and not self._pulls.is_full
        cooling, shut = self._pulls.cooling(now), self._fleet.ways.shut(now)
        return Sight(
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

    def offers(self, place: Place, sight: Sight, tokens: int, now: float) -> PlaceOffers:
        """What workers of ``place`` could have of a prompt of ``tokens``."""
        return PlaceOffers(self._fleet, self._links, self._holds, place, sight, tokens, self._longest_s, now)


class PlaceOffers:
    """``cost.Offers`` to workers of one place: few of them are asked about."""

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        holds: Holds,
        place: Place,
        sight: Sight,
        tokens: int,
        longest_s: float,
        now: float,
    ) -> None:
        self._fleet = fleet
        self._links = links
        self._holds = holds
        self._place = place
        self._sight = sight
        self._tokens = tokens
        self._longest_s = longest_s
        self._now = now

    def __repr__(self) -> str:
        return f"<PlaceOffers to {len(self._place.names)} workers>"

    def hints(self) -> Hints:
        """No worse than the real ones: what is at hand needs no loading, the rest comes the fastest way."""
        place, sight = self._place, self._sight
        at_hand, stored, coming = [0.0] * len(place.names), [0] * len(place.names), list[Coming]()
        for root, members in place.kinds.items():
            by_holder, page_tokens = sight.depths.get(root, {}), place.page_tokens[members[0]]
            there = [by_holder.get(place.store_keys[at], 0) for at in members] if by_holder else ()
            held = [by_holder.get(place.names[at], 0) for at in members] if by_holder else ()
            for at, near, own in zip(members, there, held, strict=False):
                stored[at], at_hand[at] = near, page_tokens * (near if near > own else own)
            for work, pages in sight.works.get(root, ()):
                for at in place.reach(work.worker, work.stores):
                    if place.roots[at] == root:
                        at_hand[at] = max(at_hand[at], pages * page_tokens)
            coming += self._comes(root, members)
        return Hints(at_hand, stored, coming)

    def _comes(self, root: PageName, members: Sequence[int]) -> Iterator[Coming]:
        place, quickest = self._place, self._links.quickest
        page_tokens, page_bytes = place.page_tokens[members[0]], place.page_bytes[members[0]]
        for _, _, pages in self._sight.peers.get(root, ()):
            yield Coming(
                to=members,
                pages=pages,
                tokens=pages * page_tokens,
                first_s=HOLD_S + quickest.latency_s,
                page_s=quickest.s_per_byte * page_bytes,
            )

    def __getitem__(self, at: int, /) -> list[Offer]:
        place, sight = self._place, self._sight
        root, page_tokens, row = place.roots[at], place.page_tokens[at], place.stores[at]
        by_holder = sight.depths.get(root, {})
        held, stored = by_holder.get(place.names[at], 0), by_holder.get(place.store_keys[at], 0)
        found: list[Offer] = [(ENGINE, held * page_tokens, 0.0)]
        if stored > held:  # else it has no more, and has to be loaded
            found.append((STORE, stored * page_tokens, self._links.restore_s(row, stored * place.page_bytes[at])))
        own = max(held, stored)
        if at in self._reached or any(peer.pages > own for peer in sight.peers.get(root, ())):
            found += self._waited_for(at, root, own, stored)
        return found

    @cached_property
    def _reached(self) -> set[int]:
        """Positions of those that will have what comes."""
        works = [work for each in self._sight.works.values() for work, _ in each]
        return {at for work in works for at in self._place.reach(work.worker, work.stores)}

    def _waited_for(self, at: int, root: PageName, own: int, stored: int) -> Iterator[Offer]:
        """Those that nobody waits too long for, after those that are held back already: these come when their prefix is
        there, and not while this prompt waits for its own. ``own``: pages at hand."""
        others_s = self._holds.seconds_at(self._place.names[at]) if self._holds else 0.0
        works = self._works(at, self._sight.works.get(root, ()))
        for source, length, seconds in chain(works, self._pulls(at, self._sight.peers.get(root, ()), own, stored)):
            if seconds <= self._longest_s:
                yield source, length, seconds + others_s

    def _works(self, at: int, works: Sequence[tuple[Work, int]]) -> Iterator[Offer]:
        place = self._place
        for work, pages in works:
            if (here := place.names[at] == work.worker) or place.store_keys[at] in work.stores:
                ready_s = work.remaining_s(pages, self._now) + self._then_s(at, pages, here=here)
                yield Source(Kind.UNDERWAY, work.key), pages * place.page_tokens[at], ready_s

    def _then_s(self, at: int, pages: int, *, here: bool) -> float:
        """From when they are there until they are in the worker's own cache."""
        place = self._place
        if not here:
            return HOLD_S + self._links.restore_s(place.stores[at], pages * place.page_bytes[at])
        # An engine that computes prompts one after the other need not be held back for its own.
        return HOLD_S if place.lets_pass[at] else 0.0

    def _pulls(self, at: int, peers: Sequence[Peer], own: int, stored: int) -> Iterator[Offer]:
        """From the peers that have more than ``own``; ``stored`` of it need not travel."""
        place, (latency_s, s_per_byte, in_flight_bytes) = self._place, self._links.tables
        page_tokens, page_bytes, to = place.page_tokens[at], place.page_bytes[at], place.stores[at]
        whole = self._tokens // page_tokens
        for source, row, depth in peers:
            pages = min(depth, whole)
            if pages > own and row != to and self._may_push(source.origin, place.workers[at].store):
                moving_bytes = (pages - min(pages, stored)) * page_bytes + in_flight_bytes[row][to]
                there_s = HOLD_S + latency_s[row][to] + s_per_byte[row][to] * moving_bytes
                yield source, pages * page_tokens, there_s + self._links.restore_s(to, pages * page_bytes)

    def _may_push(self, source: str, target: str) -> bool:
        cools = bool(self._sight.cooling) and (source, target) in self._sight.cooling
        return not cools and self._fleet.stores.is_usable(target, self._now)
