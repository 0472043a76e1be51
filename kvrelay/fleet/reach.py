"""Prefixes that are in no worker's reach yet and could be: under way, or in another node's store. It must never offer
one that nobody would wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import numpy as np

from kvrelay.fleet.ground import Place
from kvrelay.fleet.holdings import Depths
from kvrelay.fleet.holds import Holds
from kvrelay.fleet.index import store_name
from kvrelay.fleet.links import Links
from kvrelay.fleet.pulls import Pulls
from kvrelay.fleet.underway import Underway, Work
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.cost import Flags, Kind, Source, Sources
from kvrelay.policy.fit import Floats
from kvrelay.policy.patience import HOLD_S
from kvrelay.types import PromptNames

MOST_PEERS = 4
"""Stores that a prefix may be pulled from, those with the most of it."""


class Reach:
    """Further sources for a prompt."""

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

    def added(
        self, held: Sources, place: Place, prompt: PromptNames, depths: Depths, tokens: int, now: float
    ) -> Sources:
        """``held``, which is what workers of ``place`` have of a prompt of ``tokens``, and what they could wait for."""
        found = [*self._works(place, prompt, now), *self._peers(held, place, depths, tokens, now)]
        if not found:
            return held
        more = reduce(Sources.plus, found)
        seconds = more.seconds
        if self._holds:
            # Those that are held back come when their prefix is there, and not while this one waits for its own.
            seconds = seconds + np.array([self._holds.seconds_at(name) for name in place.names])
        lengths = np.where(more.seconds <= self._longest_s, more.tokens, 0.0)
        return held.plus(Sources(more.known, lengths, seconds))

    # ------------------------------------------------------------ under way

    def _works(self, place: Place, prompt: PromptNames, now: float) -> Iterator[Sources]:
        for root, names in prompt.items():
            if root in place.kinds and (works := self._underway.find(names)):
                yield self._coming(place, place.kinds[root], works, now)

    def _coming(self, place: Place, of_kind: Flags, works: Sequence[tuple[Work, int]], now: float) -> Sources:
        pages = np.array([[float(count)] for _, count in works])
        ready_s = np.array([[work.remaining_s(count, now)] for work, count in works])
        restore_s = self._links.restore_s(place.stores, pages * place.page_bytes)
        seconds, near = ready_s + HOLD_S + restore_s, np.zeros(restore_s.shape, dtype=bool)
        for row, (work, _) in enumerate(works):
            for store in work.stores:
                near[row, place.at.get(store, [])] = True
            for here in place.at.get(work.worker or "", ()):
                near[row, here] = True
                # An engine that computes prompts one after the other need not be held back for its own.
                seconds[row, here] = ready_s[row, 0] + (0.0 if place.passing_tokens[here] == np.inf else HOLD_S)
        return Sources(
            tuple(Source(Kind.UNDERWAY, work.key) for work, _ in works),
            np.where(near & of_kind, pages * place.page_tokens, 0.0),
            seconds,
        )

    # ------------------------------------------------------------ other nodes

    def _peers(self, held: Sources, place: Place, depths: Depths, tokens: int, now: float) -> Iterator[Sources]:
        if self._pulls.is_full or len(self._fleet.stores) < 2:
            return
        own = held.tokens[-1] / place.page_tokens
        for root, by_holder in depths.items():
            if root in place.kinds:
                of_kind = place.kinds[root]
                peers = self._deepest(by_holder, float(own[of_kind].min()), now)
                if peers:
                    whole = float(tokens // place.page_tokens[int(np.argmax(of_kind))])
                    yield self._pulled(place, of_kind, own, peers, whole, now)

    def _deepest(self, by_holder: Mapping[str, int], more_than: float, now: float) -> list[tuple[str, int]]:
        """Stores that have more of the prompt than somebody has nearby, and how many pages."""
        found: list[tuple[str, int]] = []
        for holder, pages in sorted(by_holder.items(), key=lambda each: each[1], reverse=True):
            if pages <= more_than or len(found) == MOST_PEERS:
                break
            name = store_name(holder)
            if name is not None and self._fleet.stores.is_usable(name, now):
                found.append((name, pages))
        return found

    def _pulled(
        self, place: Place, of_kind: Flags, own: Floats, peers: Sequence[tuple[str, int]], whole: float, now: float
    ) -> Sources:
        """``own``: pages that each worker's node has; ``whole``: full pages of the prompt."""
        rows = self._links.rows([name for name, _ in peers])
        latency_s, s_per_byte, in_flight = self._links.between(rows, place.stores)
        pages = np.minimum(np.array([[float(depth)] for _, depth in peers]), whole)
        lacking = np.maximum(0.0, pages - own) * place.page_bytes
        seconds = HOLD_S + latency_s + s_per_byte * (lacking + in_flight)
        usable = {name: self._fleet.stores.is_usable(name, now) for name in {each.store for each in place.workers}}
        there = np.array([usable[worker.store] for worker in place.workers], dtype=bool)
        gains = of_kind & (pages > own) & (rows[:, np.newaxis] != place.stores) & there
        if cooling := self._pulls.cooling(now):
            targets = [worker.store for worker in place.workers]
            gains &= np.array([[(name, target) not in cooling for target in targets] for name, _ in peers])
        return Sources(
            tuple(Source(Kind.PEER, name) for name, _ in peers),
            np.where(gains, pages * place.page_tokens, 0.0),
            seconds + self._links.restore_s(place.stores, pages * place.page_bytes),
        )
