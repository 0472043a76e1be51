"""One outgoing transfer: which pages to offer, which of their layers to send next. No socket; it only holds pins.

A page stays pinned from the moment it is offered until it was sent, refused, or the push ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvrelay.errors import Malformed
from kvrelay.policy.codec import BATCH_BYTES
from kvrelay.protocol.peer import PushOpen, PushPages, PushWanted, Segment, Segments, Written
from kvrelay.store.arena import Arena, Bools, Ints
from kvrelay.store.catalog import Catalog
from kvrelay.store.page import Page
from kvrelay.store.passage import Passage
from kvrelay.store.room import MAX_SLOTS
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer
from kvrelay.types import Codec, PageFormat, PageName, SlotRef, Transport

OFFER_PAGES = 256
"""Pages of one question: the peer makes room for the next ones while these are on their way."""


class Run(NamedTuple):
    """Bytes of one page without a gap."""

    view: memoryview
    slot: int
    """Where they are here."""
    start: int
    """Bytes from the start of their slot, here and there."""
    target: SlotRef | None
    """The receiver's slot, when it was lent."""


@dataclass(frozen=True)
class Batch:
    """Segments to send, and which they are."""

    message: Segments
    arena: Arena
    runs: list[Run]
    pages: Ints
    layers: Ints
    codec: Codec
    """What the peer takes, should it travel by TCP."""

    @property
    def views(self) -> list[memoryview]:
        return [run.view for run in self.runs]

    def written(self, transport: Transport) -> Written:
        """What its receiver is told once it was written into the slots that were lent for it."""
        message = self.message
        return Written(
            transfer=message.transfer,
            items=message.items,
            payload_bytes=message.payload_bytes,
            serial=message.serial,
            transport=transport,
        )

    @property
    def has_lent_slots(self) -> bool:
        """Whether the sender may write all of it into the receiver's arena."""
        return all(run.target is not None for run in self.runs)


class Push:
    """Pages of one transfer on their way to a peer."""

    def __init__(self, transfer: Transfer, shelf: Shelf, catalog: Catalog) -> None:
        self.transfer = transfer
        self.waits_since: float | None = None
        """Since when the peer owes an answer."""
        self.problem = ""
        """Why it cannot be completed; its link tells the peer and ends it."""
        self.passage = Passage()
        """What is under way: the pins of its pages are needed until it is settled."""
        self.proposed = self.codec = Codec.RAW
        """The codec that the peer was told of, and the one that it takes."""
        self._arena = shelf.arena
        self._catalog = catalog
        self._absent = {name: index for index, name in enumerate(transfer.names)}
        self._pages: dict[int, Page] = {}
        self._fresh: list[int] = []
        self._offers: deque[list[int]] = deque()
        self._wanted: list[int] = []
        self._targets: dict[int, SlotRef] = {}
        shape = (self._arena.format.layers, len(transfer.names))
        self._sent: Bools = np.zeros(shape, np.bool_)
        self._taken: Bools = np.zeros(shape, np.bool_)

    def __repr__(self) -> str:
        return f"<Push {self.transfer.id}, {len(self._absent)} absent, {len(self._wanted)} being sent>"

    @property
    def format(self) -> PageFormat:
        return self._arena.format

    @property
    def size_bytes(self) -> int:
        """All pages of the prompt, those included that need not travel."""
        format = self._arena.format
        return self.transfer.total_tokens * format.layers * format.token_layer_bytes

    def opening(self, *, direct: bool, codec: Codec) -> PushOpen:
        """The first message about it; ``direct``: ask for the slots of the pages."""
        self.proposed = codec
        return PushOpen(
            transfer=self.transfer.id,
            format=self._arena.format,
            names=list(self.transfer.names),
            total_tokens=self.transfer.total_tokens,
            direct=direct,
            codec=codec,
        )

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
        offer = [index for index in self._fresh if self._pages[index].shards == shards][:OFFER_PAGES]
        offered = set(offer)
        self._fresh = [index for index in self._fresh if index not in offered]
        self._offers.append(offer)
        self.waits_since = now if self.waits_since is None else self.waits_since
        return PushPages(transfer=self.transfer.id, indices=offer, shards=shards)

    def answer(self, answer: PushWanted, now: float) -> None:
        """The peer's answer to the oldest open offer; ``slots``: none, or one for each. Raises ``Malformed``."""
        wanted, slots = answer.indices, answer.slots
        chosen = set(wanted)
        offer = self._offers.popleft() if self._offers else []
        if not offer or not chosen.issubset(offer) or (slots and len(slots) != len(wanted)):
            raise Malformed(f"the peer wants pages of {self.transfer.id} that it was not offered")
        if not all(0 <= ref.slot < MAX_SLOTS for ref in slots):
            raise Malformed(f"the peer lends slots for {self.transfer.id} that no arena has")
        if answer.codec not in (Codec.RAW, self.proposed):
            raise Malformed(f"the peer wants pages of {self.transfer.id} in a codec that it was not offered")
        self.codec = answer.codec
        self.waits_since = now if self._offers else None
        for index in offer:
            if index not in chosen:
                self._catalog.unpin(self._pages.pop(index))
        self._wanted += sorted(chosen)
        self._targets.update(zip(wanted, slots, strict=False))

    def next_batch(self, serial: int) -> Batch | None:
        """Layers that came in since the last batch, of pages of equally many shards. They count as sent from now on."""
        if not self._wanted:
            return None
        pages = [self._pages[index] for index in self._wanted]
        slots = np.array([page.ref.slot for page in pages], np.int64)
        generations = np.array([page.ref.generation for page in pages], np.int64)
        ready = self._arena.ready_layers(slots, generations) & ~self._sent[:, self._wanted]
        columns, layers = np.nonzero(ready.T)
        # After the look, so that no layer is sent that the note does not know: its bell may not have been heard yet.
        self.note_progress()
        if not len(columns):
            return None
        shards = np.array([page.shards for page in pages], np.int64)
        alike = shards[columns] == shards[columns[0]]
        limit = max(1, BATCH_BYTES // self._arena.format.segment_bytes)
        columns, layers = columns[alike][:limit], layers[alike][:limit]
        indices = np.array(self._wanted, np.int64)[columns]
        self._sent[layers, indices] = True
        checksums = self._arena.checksums(slots[columns], layers, int(shards[columns[0]])).tolist()
        return self._batch(serial, indices, layers, checksums)

    def _batch(self, serial: int, indices: Ints, layers: Ints, checksums: list[list[int]]) -> Batch:
        places = list(zip(indices.tolist(), layers.tolist(), strict=True))
        items = [Segment(index, layer, sums) for (index, layer), sums in zip(places, checksums, strict=True)]
        runs: list[Run] = []
        for index, group in groupby(places, lambda place: place[0]):
            runs += self._runs(index, [layer for _, layer in group])
        size = sum(len(run.view) for run in runs)
        message = Segments(transfer=self.transfer.id, items=items, payload_bytes=size, serial=serial)
        return Batch(message, self._arena, runs, indices, layers, self.codec)

    def _runs(self, index: int, layers: list[int]) -> list[Run]:
        page, target, step = self._pages[index], self._targets.get(index), self._arena.format.segment_bytes
        runs: list[Run] = []
        at = 0
        for view in self._arena.views(page.ref.slot, layers, page.tokens):
            runs.append(Run(view, page.ref.slot, layers[at] * step, target))
            at += max(1, len(view) // step)
        return runs

    def settle(self, batch: Batch) -> None:
        """The peer has taken ``batch``: let go of the pages that are done."""
        self.passage.take(batch.message.payload_bytes)
        self._taken[batch.layers, batch.pages] = True
        carried = np.unique(batch.pages)
        done = set(carried[self._taken[:, carried].all(axis=0)].tolist())
        for index in done.intersection(self._pages):
            self._catalog.unpin(self._pages.pop(index))
        self._wanted = [index for index in self._wanted if index not in done]

    def note_progress(self) -> None:
        """Look whether the prefill has ended: whether every layer of every page of the prompt is here.

        The sender counts what is left then, because it alone knows the moment: two nodes' clocks differ by more than a
        hand-off takes. What the peer has not said to have taken counts as left.
        """
        if not self.passage.is_prefill_over and not self._absent and self._is_whole():
            self.passage.end_prefill()

    def _is_whole(self) -> bool:
        """The pages that were let go do not count: the peer has them, or all their layers were here and were sent."""
        slots = np.array([page.ref.slot for page in self._pages.values()], np.int64)
        generations = np.array([page.ref.generation for page in self._pages.values()], np.int64)
        return bool(self._arena.ready_layers(slots, generations).all())

    def close(self) -> None:
        """Let go of everything."""
        for page in self._pages.values():
            self._catalog.unpin(page)
        self._pages, self._absent, self._fresh, self._wanted = {}, {}, [], []
        self._offers.clear()
