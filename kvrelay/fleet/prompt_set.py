"""Several prompts of a request that one worker computes: how much that is, and what of it each worker has.

It must never count twice what prompts share: an engine computes that once. Choices of one prompt share nearly all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvrelay.fleet.holdings import Depths, Holdings
from kvrelay.fleet.prefix_finder import PrefixOffers
from kvrelay.fleet.topology import WorkerColumns
from kvrelay.policy.cost import Hints, Offer
from kvrelay.types import Fingerprint, PageName, PromptNames, RequestFacts

MAX_LOOKED_FOR = 64
"""Prompts beside the longest of which it is asked who holds them; of more, nobody is thought to hold any."""


class _Other(NamedTuple):
    """A prompt beside the longest one."""

    tokens: int
    depths: Depths
    shared: Mapping[PageName, int]
    """Leading pages that it shares with prompts before it, by root."""


class PromptSet(NamedTuple):
    """All prompts of a request that one worker computes."""

    tokens: int
    """Tokens to be computed if nothing of the prompts were cached."""
    first_tokens: int
    """Tokens of the longest prompt."""
    names: PromptNames
    """Names of the longest prompt's pages."""
    others: tuple[_Other, ...]

    @classmethod
    def of(cls, facts: RequestFacts, namings: Mapping[PageName, Fingerprint], holdings: Holdings) -> PromptSet:
        """``namings`` tell how long the pages are that a root names."""
        lengths = facts.prompt_tokens
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        names = facts.page_names or ({},) * len(lengths)
        seen = {root: set(pages) for root, pages in names[order[0]].items()}
        tokens, others = lengths[order[0]], list[_Other]()
        for at in order[1:]:
            shared = {root: _leading(pages, seen.setdefault(root, set())) for root, pages in names[at].items()}
            tokens += lengths[at] - _shared_tokens(shared, lengths[at], namings)
            if len(others) < MAX_LOOKED_FOR:
                others.append(_Other(lengths[at], holdings.depths(names[at]), shared))
            for root, pages in names[at].items():
                seen[root].update(pages)
        return cls(tokens, lengths[order[0]], names[order[0]], tuple(others))

    def at_hand(self, columns: WorkerColumns) -> list[float]:
        """Tokens of the others that each worker of ``columns`` could have at once, beyond what they share."""
        return [self._at_hand(columns, at) for at in range(len(columns.names))]

    def _at_hand(self, columns: WorkerColumns, at: int) -> float:
        root, page_tokens, at_hand = columns.roots[at], columns.page_tokens[at], 0
        for tokens, depths, shared in self.others:
            by_holder = depths.get(root, {})
            held = max(by_holder.get(columns.names[at], 0), by_holder.get(columns.store_keys[at], 0))
            leading = _leading_tokens(shared.get(root, 0), page_tokens, tokens)
            at_hand += max(0, _leading_tokens(held, page_tokens, tokens) - leading)
        return float(at_hand)


class PromptSetOffers:
    """``cost.Offers`` of all prompts: what there is of the longest one, and of the others what is at hand."""

    def __init__(self, first: PrefixOffers, others: Sequence[float]) -> None:
        """``others``: tokens by worker."""
        self._first = first
        self._others = others

    def __repr__(self) -> str:
        return f"<PromptSetOffers beside {self._first!r}>"

    def hints(self) -> Hints:
        hints, others = self._first.hints(), self._others
        return Hints(
            at_hand=[own + more for own, more in zip(hints.at_hand, others, strict=True)],
            stored=hints.stored,
            coming=[
                each._replace(tokens=each.tokens + max((others[at] for at in each.to), default=0.0))
                for each in hints.coming
            ],
        )

    def __getitem__(self, at: int, /) -> list[Offer]:
        return [(source, tokens + self._others[at], seconds) for source, tokens, seconds in self._first[at]]


def _leading(pages: Sequence[PageName], seen: set[PageName]) -> int:
    return next((index for index, name in enumerate(pages) if name not in seen), len(pages))


def _shared_tokens(shared: Mapping[PageName, int], tokens: int, namings: Mapping[PageName, Fingerprint]) -> int:
    """Tokens of a prompt of ``tokens`` that it shares with prompts before it, by the longest of its roots."""
    lengths = {root: namings[root].format.page_tokens for root in shared if root in namings}
    return max((_leading_tokens(shared[root], each, tokens) for root, each in lengths.items()), default=0)


def _leading_tokens(pages: int, page_tokens: int, tokens: int) -> int:
    """Tokens in so many leading pages of a prompt of ``tokens``: its last page may be part of one."""
    return min(tokens, pages * page_tokens)
