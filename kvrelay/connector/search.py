"""What a new request can load, over all KV types that may serve it: one lookup each, the engine's own type first.

A request is loaded from pages of one type only. Its own type wins a tie: those pages are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay import identity
from kvrelay.connector.lookup import Lookup
from kvrelay.types import Fingerprint, PageFormat


def foreign_types(own: Fingerprint, hinted: Iterable[str]) -> list[Fingerprint]:
    """Fingerprints of engines like this one whose pages it can convert, among the KV types ``hinted`` by a router."""
    known = identity.CONVERTIBLE_DTYPES
    wanted = known.intersection(hinted) - {own.format.dtype} if own.format.dtype in known else frozenset()
    return [identity.with_dtype(own, dtype) for dtype in sorted(wanted)]


@dataclass(frozen=True)
class Found:
    """The lookup to load from. ``format``: that of its pages where it is not the engine's own."""

    lookup: Lookup
    format: PageFormat | None

    @property
    def tokens(self) -> int:
        """Tokens of its pages before the first miss."""
        return sum(page.tokens for page in self.lookup.usable())


class Search:
    """All lookups of one request, from arrival to admission."""

    def __init__(self, own: Lookup, foreign: Sequence[tuple[PageFormat, Lookup]] = ()) -> None:
        self.own = own
        self._all = [Found(own, None), *(Found(lookup, page_format) for page_format, lookup in foreign)]

    def __repr__(self) -> str:
        return f"<Search {', '.join(repr(found.lookup) for found in self._all)}>"

    def settled(self, now: float) -> bool:
        """Whether all answers are final."""
        answers = [found.lookup.settled(now) for found in self._all]  # each is to be asked, also behind an open one
        return all(answers)

    def best(self) -> Found:
        """The lookup that found most."""
        return max(self._all, key=lambda found: found.tokens)

    def release(self, but: Found | None = None) -> None:
        """Give the pins back, all or all but those of one lookup."""
        for found in self._all:
            if found is not but:
                found.lookup.release()
