"""One outgoing transfer: which pages to offer, which of their layers to send next. No socket; it only holds pins.

A page stays pinned from the moment it is offered until it was sent, refused, or the push ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvrelay.errors import Malformed
from kvrelay.protocol import PushOpen, PushPages, Segment, Segments
from kvrelay.store.arena import Bools
from kvrelay.store.catalog import Catalog
from kvrelay.store.page import Page
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer
from kvrelay.types import PageName

BATCH_BYTES = 4 << 20
"""Payload of one message: long enough to hide its cost, short enough that pushes to one peer take turns."""


@dataclass(frozen=True)
class Batch:
    """Segments to send, and the pages that are done with them."""

    message: Segments
    views: list[memoryview]
    done: list[int]


class Push:
    """Pages of one transfer on their way to a peer."""

    def __init__(self, transfer: Transfer, shelf: Shelf, catalog: Catalog) -> None:
        self.transfer = transfer
        self.opening = PushOpen(
            transfer=transfer.id,
            format=shelf.arena.format,
            names=list(transfer.names),
            total_tokens=transfer.total_tokens,
        )
        self.waits_since: float | None = None
        """Since when the peer owes an answer."""
        self.problem = ""
        """Why it cannot be completed; its link tells the peer and ends it."""
        self.queued_bytes: Callable[[], int] = lambda: 0
        """Bytes that were handed to its link and that the peer's machine did not take yet."""
        self._out_bytes = 0
        self._out_when_whole: int | None = None
        """Bytes that had reached the peer when the prompt's last layer was here."""
        self._arena = shelf.arena
        self._catalog = catalog
        self._absent = {name: index for index, name in enumerate(transfer.names)}
        self._pages: dict[int, Page] = {}
        self._fresh: list[int] = []
        self._offers: deque[list[int]] = deque()
        self._wanted: list[int] = []
        self._sent: Bools = np.zeros((self._arena.format.layers, 0), np.bool_)

    def __repr__(self) -> str:
        return f"<Push {self.transfer.id}, {len(self._absent)} absent, {len(self._wanted)} being sent>"

    @property
    def is_done(self) -> bool:
        """Every page was offered and answered, and every wanted one was sent."""
        return not (self._absent or self._pages)

    @property
    def is_sending(self) -> bool:
        return bool(self._wanted)

    @property
    def absent(self) -> list[PageName]:
        """Names of pages that are not here yet."""
        return list(self._absent)

    def page_here(self, page: Page, now: float) -> None:
        """A page of the prompt exists here, whole or being filled."""
        index = self._absent.pop(page.name, None)
        if index is not None:
            self._catalog.pin(page, now)
            self._pages[index] = page
            self._fresh.append(index)
            if page.tokens != self._arena.format.tokens_of(index, self.transfer.total_tokens):
                self.problem = f"page {index} has {page.tokens} tokens, which is not its place in the prompt"

    def give_up_absent(self) -> None:
        """Pages that are not here will not come."""
        self._absent.clear()

    def holds(self, page: Page) -> bool:
        return any(held is page for held in self._pages.values())

    def next_offer(self, now: float) -> PushPages | None:
        """Pages to ask the peer about, all of equally many shards; call again for the others."""
        if not self._fresh:
            return None
        shards = self._pages[self._fresh[0]].shards
        offer = [index for index in self._fresh if self._pages[index].shards == shards]
        self._fresh = [index for index in self._fresh if self._pages[index].shards != shards]
        self._offers.append(offer)
        self.waits_since = now if self.waits_since is None else self.waits_since
        return PushPages(transfer=self.transfer.id, indices=offer, shards=shards)

    def answer(self, wanted: Iterable[int], now: float) -> None:
        """The peer's answer to the oldest open offer. Raises ``Malformed``."""
        chosen = set(wanted)
        offer = self._offers.popleft() if self._offers else []
        if not offer or not chosen.issubset(offer):
            raise Malformed(f"the peer wants pages of {self.transfer.id} that it was not offered")
        self.waits_since = now if self._offers else None
        for index in offer:
            if index not in chosen:
                self._catalog.unpin(self._pages.pop(index))
        self._wanted += sorted(chosen)
        unsent = np.zeros((len(self._sent), len(chosen)), np.bool_)
        self._sent = np.concatenate([self._sent, unsent], axis=1)

    def next_batch(self) -> Batch | None:
        """Layers that came in since the last batch, of pages of equally many shards. They count as sent from now on."""
        if not self._wanted:
            return None
        pages = [self._pages[index] for index in self._wanted]
        slots = np.array([page.ref.slot for page in pages], np.int64)
        generations = np.array([page.ref.generation for page in pages], np.int64)
        columns, layers = np.nonzero((self._arena.ready_layers(slots, generations) & ~self._sent).T)
        # After the look, so that no layer is sent that the note does not know: its bell may not have been heard yet.
        self.note_progress()
        if not len(columns):
            return None
        shards = np.array([page.shards for page in pages], np.int64)
        alike = shards[columns] == shards[columns[0]]
        limit = max(1, BATCH_BYTES // self._arena.format.segment_bytes)
        columns, layers = columns[alike][:limit], layers[alike][:limit]
        self._sent[layers, columns] = True
        checksums = self._arena.checksums(slots[columns], layers, int(shards[columns[0]])).tolist()
        return self._batch(pages, columns.tolist(), layers.tolist(), checksums)

    def _batch(self, pages: list[Page], columns: list[int], layers: list[int], checksums: list[list[int]]) -> Batch:
        wanted = self._wanted
        items = [Segment(wanted[c], layer, s) for c, layer, s in zip(columns, layers, checksums, strict=True)]
        views: list[memoryview] = []
        for column, group in groupby(zip(columns, layers, strict=True), lambda pair: pair[0]):
            page = pages[column]
            views += self._arena.views(page.ref.slot, [layer for _, layer in group], page.tokens)
        size = sum(map(len, views))
        done = [wanted[column] for column in np.flatnonzero(self._sent.all(axis=0)).tolist()]
        return Batch(Segments(transfer=self.transfer.id, items=items, payload_bytes=size), views, done)

    def settle(self, batch: Batch) -> None:
        """``batch`` is out: let go of the pages that are done."""
        self._out_bytes += batch.message.payload_bytes
        if not batch.done:
            return
        for index in batch.done:
            page = self._pages.pop(index, None)
            if page is not None:
                self._catalog.unpin(page)
        done = set(batch.done)
        keep = [position for position, index in enumerate(self._wanted) if index not in done]
        self._wanted = [self._wanted[position] for position in keep]
        self._sent = self._sent[:, keep]

    def note_progress(self) -> None:
        """Look whether the prefill has ended: whether every layer of every page of the prompt is here.

        The sender counts what is left then, because it alone knows the moment: two nodes' clocks differ by more than a
        hand-off takes. What the peer's machine has not taken counts as left, what it has taken as moved.
        """
        if self._out_when_whole is None and not self._absent and self._is_whole():
            self._out_when_whole = max(0, self._out_bytes - self.queued_bytes())

    def _is_whole(self) -> bool:
        """The pages that were let go do not count: the peer has them, or all their layers were here and were sent."""
        slots = np.array([page.ref.slot for page in self._pages.values()], np.int64)
        generations = np.array([page.ref.generation for page in self._pages.values()], np.int64)
        return bool(self._arena.ready_layers(slots, generations).all())

    @property
    def late_bytes(self) -> int:
        """Bytes that were still to move when the prefill ended; known once everything was sent."""
        return self._out_bytes - (self._out_when_whole or 0)

    def close(self) -> None:
        """Let go of everything."""
        for page in self._pages.values():
            self._catalog.unpin(page)
        self._pages, self._absent, self._fresh, self._wanted = {}, {}, [], []
        self._offers.clear()
        self._sent = self._sent[:, :0]
