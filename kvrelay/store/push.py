"""One outgoing transfer: which pages to offer, which of their layers to send next. No socket; it only holds pins.

A page stays pinned from the moment it is offered until it was sent, refused, or the push ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvrelay.errors import Malformed
from kvrelay.policy.codec import BATCH_BYTES
from kvrelay.protocol.peer import PushNews, PushOpen, PushPages, PushWanted, Segments
from kvrelay.store.arena import Bools, Ints, SlotState
from kvrelay.store.batch import Batch, Places, runs_of
from kvrelay.store.catalog import Catalog
from kvrelay.store.cohort import Cohort, Portion
from kvrelay.store.elsewhere import MAX_OFFERS
from kvrelay.store.page import Page
from kvrelay.store.passage import Passage
from kvrelay.store.room import MAX_SLOTS
from kvrelay.store.segments import Columns, tally
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer
from kvrelay.types import Codec, PageFormat, PageName

GIVEN_UP = "a page of it was given up by its writer"
OFFER_PAGES = 256
"""Pages of one question: the peer makes room for the next ones while these are on their way."""
RAW_BATCH_BYTES = 2 * BATCH_BYTES
"""Sent at a time as it is: each batch costs either end about 0.5 ms, whatever its size, and this one moves in 5 ms."""


class Push:
    """Pages of one transfer on their way to a peer."""

    def __init__(self, transfer: Transfer, shelf: Shelf, catalog: Catalog, *, is_bulk: bool = False) -> None:
        self.transfer = transfer
        self.is_bulk = is_bulk
        """Nobody computes what it brings right now: hand-offs go before."""
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
        self._place_of = dict(self._absent)
        self._pages: dict[int, Page] = {}
        self._fresh: deque[int] = deque()
        self._offers: deque[list[int]] = deque()
        self._times: Ints = np.zeros(len(transfer.names), np.int64)
        """How often each page was offered."""
        self._elsewhere: set[int] = set()
        """Pages that others are bringing to the peer, held until it tells what became of them."""
        self._cohorts: list[Cohort] = []
        """Of pages that the peer asked for: those of which something is to be sent yet."""
        self._left: Ints = np.full(len(transfer.names), self._arena.format.layers, np.int64)
        """Layers of each page that the peer has not said to have taken."""
        self._is_sent: Bools = np.zeros(len(transfer.names), np.bool_)
        """Pages of which a layer was sent, whether it was taken or not."""
        self._filling: list[int] = []
        """Pages of which some layers may be lacking here."""

    def __repr__(self) -> str:
        return f"<Push {self.transfer.id}, {len(self._absent)} absent, {len(self._pages)} held>"

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
        """Every page was offered and answered, every wanted one was sent, and no other one is held for the peer."""
        return not (self._absent or self._pages)

    @property
    def is_sending(self) -> bool:
        return bool(self._cohorts)

    @property
    def absent(self) -> list[PageName]:
        """Names of pages that are not here yet."""
        return list(self._absent)

    def pages_here(self, pages: Sequence[Page], now: float) -> None:
        """Pages of the prompt exist here, whole or being filled."""
        here = [(index, page) for page in pages if (index := self._absent.pop(page.name, None)) is not None]
        self._catalog.pins.hold([page for _, page in here], now)
        self._pages.update(here)
        self._fresh.extend(index for index, _ in here)
        self._filling += [index for index, page in here if page.state is not SlotState.COMPLETE]
        full, last = self._arena.format.page_tokens, len(self.transfer.names) - 1
        for index, page in here:
            if page.tokens != (full if index < last else self.transfer.total_tokens - last * full):
                self.problem = f"page {index} has {page.tokens} tokens, which is not its place in the prompt"

    def give_up_absent(self) -> None:
        """Pages that are not here will not come."""
        self._absent.clear()

    def holds(self, page: Page) -> bool:
        return self._pages.get(self._place_of.get(page.name, -1)) is page

    def replace(self, page: Page, copy: Page, now: float) -> bool:
        """Go on with another copy of a page that it holds. False when it cannot be: something of it was sent."""
        index = self._place_of[page.name]
        if self._is_sent[index] or (copy.shelf, copy.tokens, copy.shards) != (page.shelf, page.tokens, page.shards):
            return False
        self._catalog.pins.hold((copy,), now)
        self._catalog.pins.release((page,))
        self._pages[index] = copy
        self._filling.append(index)
        for cohort in self._cohorts:
            cohort.replace(index, copy.ref)
        return True

    def next_offer(self, now: float) -> PushPages | None:
        """Pages to ask the peer about, all of equally many shards; call again for the others."""
        if not self._fresh:
            return None
        shards, offer = self._pages[self._fresh[0]].shards, list[int]()
        while self._fresh and len(offer) < OFFER_PAGES and self._pages[self._fresh[0]].shards == shards:
            offer.append(self._fresh.popleft())
        self._offers.append(offer)
        self._times[offer] += 1
        self.waits_since = now if self.waits_since is None else self.waits_since
        return PushPages(transfer=self.transfer.id, indices=offer, shards=shards)

    def answer(self, answer: PushWanted, now: float) -> None:
        """The peer's answer to the oldest open offer; ``slots``: none, or one for each. Raises ``Malformed``."""
        wanted, slots = answer.indices, answer.slots
        chosen, elsewhere = set(wanted), set(answer.elsewhere)
        offer = self._offers.popleft() if self._offers else []
        if not offer or not chosen.issubset(offer) or len(chosen) != len(wanted) or len(slots) not in (0, len(wanted)):
            raise Malformed(f"the peer wants pages of {self.transfer.id} that it was not offered")
        if not elsewhere.issubset(offer) or elsewhere & chosen or (self._times[list(elsewhere)] >= MAX_OFFERS).any():
            raise Malformed(f"the peer has pages of {self.transfer.id} held that it must not")
        if not all(0 <= ref.slot < MAX_SLOTS and 0 <= ref.generation < 1 << 63 for ref in slots):
            raise Malformed(f"the peer lends slots for {self.transfer.id} that no arena has")
        if answer.codec not in (Codec.RAW, self.proposed):
            raise Malformed(f"the peer wants pages of {self.transfer.id} in a codec that it was not offered")
        self.codec = answer.codec
        self.waits_since = now if self._offers else None
        self._elsewhere |= elsewhere
        self._release([index for index in offer if index not in chosen and index not in elsewhere])
        if wanted:
            self._cohorts.append(Cohort(self._arena, wanted, [self._pages[index] for index in wanted], slots))

    def heard(self, news: PushNews, now: float) -> None:
        """What became of pages that others were bringing to the peer. Raises ``Malformed``."""
        told = {*news.over, *news.lacking}
        if not told <= self._elsewhere or len(told) != len(news.over) + len(news.lacking):
            raise Malformed(f"the peer tells of pages of {self.transfer.id} that are not held for it")
        self._elsewhere -= told
        self._release(news.over)
        self._fresh.extend(news.lacking)
        for page in [self._pages[index] for index in news.lacking]:
            if page.state is SlotState.FAILED:
                self._recover(page, now)

    def _recover(self, page: Page, now: float) -> None:
        """A page was given up here that the peer did not get from others: another copy may have come meanwhile."""
        copy = self._catalog.find(page.name)
        if copy is None or not self.replace(page, copy, now):
            self.problem = GIVEN_UP

    def is_elsewhere(self, page: Page) -> bool:
        """Whether the peer gets it from others, so far."""
        return self._place_of.get(page.name) in self._elsewhere

    def _release(self, indices: Sequence[int]) -> None:
        self._catalog.pins.release([self._pages.pop(index) for index in indices])

    @property
    def most_batch_bytes(self) -> int:
        return RAW_BATCH_BYTES if self.codec is Codec.RAW else BATCH_BYTES

    def next_batch(self, serial: int, most_bytes: int) -> Batch | None:
        """Layers that came in since the last batch, of pages of equally many shards. They count as sent from now on.

        ``most_bytes``: not much more of them.
        """
        shards, portions = self._take(max(1, most_bytes // self._arena.format.segment_bytes))
        # After the look, so that no layer is sent that the note does not know: its bell may not have been heard yet.
        self.note_progress()
        if not portions:
            return None
        pages = np.concatenate([portion.pages for portion in portions])
        places = Places(*map(np.concatenate, zip(*(portion.places for portion in portions), strict=True)))
        self._is_sent[pages] = True
        columns = Columns(pages, places.layers, self._arena.checksums(places.slots, places.layers, shards))
        message = Segments(
            transfer=self.transfer.id,
            manifest=columns.manifest(),
            payload_bytes=int(places.sizes.sum()),
            serial=serial,
        )
        return Batch(message, columns, self._arena, runs_of(places, self._arena.format.segment_bytes), self.codec)

    def _take(self, limit: int) -> tuple[int, list[Portion]]:
        """Up to ``limit`` segments, from the oldest cohorts on, and how many shards each has."""
        portions: list[Portion] = []
        shards = 0
        for cohort in self._cohorts:
            if limit > 0 and (not portions or cohort.shards == shards):
                portion = cohort.take(limit)
                if len(portion.pages):
                    limit, shards = limit - len(portion.pages), cohort.shards
                    portions.append(portion)
        self._cohorts = [cohort for cohort in self._cohorts if not cohort.is_through]
        return shards, portions

    def settle(self, batch: Batch) -> None:
        """The peer has taken ``batch``: let go of the pages that are done."""
        self.passage.take(batch.message.payload_bytes)
        carried, counts = tally(batch.columns.pages)
        self._left[carried] -= counts
        done = carried[self._left[carried] == 0].tolist()
        self._catalog.pins.release([page for index in done if (page := self._pages.pop(index, None)) is not None])

    def note_progress(self) -> None:
        """Look whether the prefill has ended: whether every layer of every page of the prompt is here.

        The sender counts what is left then, because it alone knows the moment: two nodes' clocks differ by more than a
        hand-off takes. What the peer has not said to have taken counts as left.
        """
        if not self.passage.is_prefill_over and not self._absent and self._is_whole():
            self.passage.end_prefill()

    def _is_whole(self) -> bool:
        """The pages that were let go do not count: the peer has them, or all their layers were here and were sent.

        A page that was found whole is not looked at again.
        """
        while self._filling:
            page = self._pages.get(self._filling[-1])
            if page is not None and page.state is not SlotState.COMPLETE and not self._arena.is_whole(page.ref):
                return False
            self._filling.pop()
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._catalog.pins.release(self._pages.values())
        self._pages, self._absent, self._cohorts = {}, {}, []
        self._fresh.clear()
        self._offers.clear()
        self._elsewhere.clear()
