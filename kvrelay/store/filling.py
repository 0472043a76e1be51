"""Pages of one arena that are being filled, and what came in since the last look.

Of pages that clients fill, the marks tell; of those that come from a peer, whoever receives them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvrelay.store.arena import Arena
from kvrelay.store.frontier import Frontier
from kvrelay.store.page import Page

Pages = npt.NDArray[np.object_]


class Filling:
    """The announced, unfinished pages of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._layers = arena.format.layers
        self._pages: dict[Page, None] = {}
        self._watched: Pages = np.empty(0, np.object_)
        """Page of each row of the frontier."""
        self._frontier = Frontier(arena)
        self._fresh: list[Page] = []
        """To be watched from the next look on."""
        self._is_outdated = False
        """Some of ``_watched`` may be in ``_pages`` no more."""

    def __repr__(self) -> str:
        return f"<Filling {len(self._pages)} pages>"

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: Page) -> bool:
        return page in self._pages

    def watch(self, page: Page) -> None:
        """A client fills it: look at its marks."""
        self._pages[page] = None
        self._fresh.append(page)

    def expect(self, pages: Iterable[Page]) -> None:
        """Whoever receives these tells when they are whole."""
        self._pages.update(dict.fromkeys(pages))

    def discard(self, pages: Iterable[Page]) -> None:
        """Look at these no more."""
        for page in pages:
            if page in self._pages:
                del self._pages[page]
                self._is_outdated = True

    def stalled(self, before: float) -> list[Page]:
        """Pages that did not move since ``before``."""
        return [page for page in self._pages if page.moved_at < before]

    def scan(self, now: float) -> tuple[list[Page], bool]:
        """Watched pages that are whole now, which are watched no more, and whether any page moved at all."""
        self._update()
        if not len(self._watched):
            return [], False
        moved = self._frontier.advance()
        counts = self._frontier.layers[moved]
        for page, count in zip(self._watched[moved].tolist(), counts.tolist(), strict=True):
            page.layers_in, page.moved_at = count, now
        whole: list[Page] = self._watched[moved[counts == self._layers]].tolist()
        self.discard(whole)
        return whole, len(moved) > 0

    def _update(self) -> None:
        """Let the rows be those of the pages that are watched now."""
        if self._is_outdated:
            kept = np.fromiter((page in self._pages for page in self._watched), np.bool_, len(self._watched))
            self._frontier.keep(kept)
            self._watched, self._is_outdated = self._watched[kept], False
        fresh, self._fresh = [page for page in self._fresh if page in self._pages], []
        if fresh:
            self._frontier.extend([page.ref for page in fresh])
            self._watched = np.concatenate((self._watched, np.array(fresh, np.object_)))
