"""One push as its receiver sees it: which pages are on their way, and where the bytes of each batch go.

It must never publish a layer whose checksum does not hold, nor free a slot that somebody may still write into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrelay.errors import Malformed
from kvrelay.protocol.peer import Segments, Written
from kvrelay.store.arena import Ints
from kvrelay.store.catalog import QUARANTINE_S
from kvrelay.store.elsewhere import Elsewhere, News
from kvrelay.store.keeper import Keeper, check_shards
from kvrelay.store.landing import Landing
from kvrelay.store.packing import MAX_PACKED_BYTES
from kvrelay.store.page import FOREVER, Coming, Page, Writer
from kvrelay.store.segments import Columns, has_twins, read_manifest, tally
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer
from kvrelay.store.wanted import Wanted
from kvrelay.types import Codec, PageFormat, PageName, SlotRef

_NOBODY: Ints = np.empty(0, np.int64)


class Wish(NamedTuple):
    """Which of some offered pages should be sent, the slots that they get, and which the sender is to hold."""

    pages: list[int]
    slots: list[SlotRef]
    elsewhere: list[int]


class Incoming:
    """Pages of one transfer on their way here."""

    def __init__(
        self,
        transfer: Transfer,
        shelf: Shelf,
        names: list[PageName],
        total_tokens: int,
        keeper: Keeper,
        writer: Writer,
        *,
        lends: bool,
        codec: Codec,
    ) -> None:
        self.transfer = transfer
        self.lends = lends
        """Its sender writes into the slots of its pages by itself, until it says that it is through."""
        self.codec = codec
        """The one that is taken besides RAW."""
        self._shelf = shelf
        self._names = names
        self._total_tokens = total_tokens
        self._keeper = keeper
        self._writer = writer
        self._wanted = Wanted(len(names), shelf.arena.format.layers)
        self._elsewhere = Elsewhere(transfer)
        self._kept: dict[PageName, Page] = {}
        """Pages of the prompt that were here already or were received, pinned as long as all may arrive.

        Room is never made by evicting these, for the others or for another push: without room both give up, and the
        first that does lets go of its own.
        """
        self._lent: list[Page] = []
        """Pages that were given up while the sender may still write into their slots."""

    def __repr__(self) -> str:
        return f"<Incoming {self.transfer.id}, {len(self._wanted)} pages on their way>"

    @property
    def format(self) -> PageFormat:
        return self._shelf.arena.format

    @property
    def kv_heads(self) -> int:
        return self.format.kv_heads

    def names(self, indices: Sequence[int]) -> list[PageName]:
        return [self._names[index] for index in indices]

    def _tokens(self, indices: Ints) -> Ints:
        """Valid tokens of pages of the prompt. Raises ``Malformed``."""
        if indices.max(initial=0) >= len(self._names):
            raise Malformed(f"{self.transfer.id} has no page {indices.max()}")
        tokens: Ints = np.minimum(self.format.page_tokens, self._total_tokens - indices * self.format.page_tokens)
        return tokens

    # ------------------------------------------------------------ offers

    def begin(self, now: float) -> None:
        """Keep what is here, before the first offer: those of a long prompt come one after the other."""
        self.transfer.let_go = self._let_go
        self._keep(self._names, now)

    def want(self, offered: list[int], shards: int, now: float) -> Wish:
        """Make room for the pages that are lacking here."""
        catalog, names, positions = self._keeper.catalog, self._names, np.array(offered, np.int64)
        tokens = dict(zip(offered, self._tokens(positions).tolist(), strict=True))
        if not self.transfer.is_open:
            return Wish([], [], [])
        unasked = positions[self._wanted.rows(positions) == 0].tolist()
        found = self._keep(self.names(unasked), now)
        elsewhere = self._elsewhere.hold(unasked, found)
        self._keeper.transfers.offered(self.transfer, self.names(sorted({*offered}.difference(elsewhere))))
        lacking = [index for index, page in zip(unasked, found, strict=True) if page is None]
        refs = catalog.take(self._shelf, len(lacking), now)
        wanted, refused = lacking[: len(refs)], lacking[len(refs) :]
        coming = Coming(
            self.names(wanted),
            refs,
            [tokens[index] for index in wanted],
            [names[index - 1] if index else None for index in wanted],
            shards,
        )
        self._wanted.add(wanted, self._keeper.receive(self._writer, self._shelf, coming, now))
        if refused:
            self._keeper.transfers.give_up(self.transfer, self.names(refused), now)
        return Wish(wanted, refs, elsewhere)

    def news(self) -> News:
        """What became of pages that others were bringing."""
        return self._elsewhere.news()

    def _keep(self, names: Sequence[PageName], now: float) -> list[Page | None]:
        """Keep those that are here, whole or arriving, as they are found now: one that was given up has no claim."""
        catalog, kept = self._keeper.catalog, self._kept
        pages = [catalog.find(name) for name in names]
        if self.transfer.may_arrive:
            here = {page.name: page for page in pages if page is not None and kept.get(page.name) is not page}
            catalog.pins.hold(here.values(), now)
            self._unpin([kept[name] for name in here if name in kept])
            kept.update(here)
        return pages

    def _let_go(self) -> None:
        self._unpin(list(self._kept.values()))
        self._kept.clear()

    # ------------------------------------------------------------ batches

    def land(self, message: Segments | Written) -> Landing:
        """A place for every segment; ``landed`` must follow. Raises ``Malformed`` when they are not what they claim."""
        columns = read_manifest(message.manifest)
        check_shards(columns.shards, self.kv_heads)
        sizes = self._tokens(columns.pages) * self.format.token_layer_bytes
        self._check(message, int(sizes.sum()), columns)
        rows = self._wanted.rows(columns.pages)
        if ((self._wanted.shards[rows] != columns.shards) & (rows > 0)).any():
            raise Malformed(f"segments of {message.transfer} do not have a checksum for each shard of their pages")
        slots, generations = self._wanted.slots[rows], self._wanted.generations[rows]
        rows[self._shelf.arena.lost(slots, generations)] = 0  # they were given up here meanwhile
        taken = self._wanted.take(rows, columns.layers)
        held, _ = tally(rows[taken])
        self._wanted.hold(held)
        return Landing(self._shelf.arena, columns, rows, slots, generations, sizes, taken, held)

    def _check(self, message: Segments | Written, raw_bytes: int, columns: Columns) -> None:
        """Before anything is made for it: what it claims is bounded by a payload, or by what codecs may unpack."""
        if columns.layers.max() >= self.format.layers:
            raise Malformed(f"segments of {message.transfer} are of a layer that its pages have not")
        if has_twins(columns.pages * self.format.layers + columns.layers):
            raise Malformed(f"segments of {message.transfer} come twice in one message")
        codec = message.codec if isinstance(message, Segments) else Codec.RAW
        if codec not in (Codec.RAW, self.codec):
            raise Malformed(f"segments of {message.transfer} come in {codec}, which was not agreed on")
        if codec is Codec.RAW and message.payload_bytes != raw_bytes:
            raise Malformed(f"segments of {message.transfer} do not add up to its payload")
        if codec is not Codec.RAW and not message.payload_bytes < raw_bytes <= MAX_PACKED_BYTES:
            raise Malformed(f"segments of {message.transfer}, {raw_bytes} bytes, come as {message.payload_bytes}")

    def verify(self, landing: Landing, part: slice, now: float) -> list[int]:
        """A piece is in: publish the segments that hold what their sender says. The pages of the others, given up."""
        arena, columns = self._shelf.arena, landing.columns
        landing.verified = part.stop
        at = landing.taken_in(part)
        is_open = self._wanted.is_open[landing.rows[at]]
        if not is_open.all():  # the others were given up meanwhile
            at = landing.positions(at)[is_open]
        is_sound, damaged = landing.are_sound(at), _NOBODY
        if not is_sound.all():
            at, damaged = landing.positions(at)[is_sound], landing.positions(at)[~is_sound]
        arena.publish_segments(landing.slots[at], landing.generations[at], columns.layers[at], columns.checksums[at])
        self._moved(self._wanted.verified(landing.rows[at]), now)
        self._damaged(landing.rows[damaged], now)
        pages: list[int] = columns.pages[damaged].tolist()
        return pages

    def _damaged(self, rows: Ints, now: float) -> None:
        rows, _ = tally(rows)
        self._keeper.counts.add("checksum_failures", len(rows))
        self._give_up(rows, FOREVER if self.lends else now)

    def _moved(self, rows: Ints, now: float) -> None:
        """Layers of these pages were verified; those of which nothing more is to come are kept with the others."""
        counts, pages = self._wanted.layers_in(rows), self._wanted.of(rows)
        for page, count in zip(pages, counts.tolist(), strict=True):
            page.layers_in = count
        whole = rows[counts == self.format.layers]
        self.transfer.traffic.pages += len(whole)
        self._keeper.counts.add("pages_received", len(whole))
        received = pages if len(whole) == len(pages) else self._wanted.of(whole)
        self._keeper.received(self._shelf, received, now)
        self._keep([page.name for page in received], now)
        self._unpin(self._wanted.let_go(whole))

    def landed(self, landing: Landing) -> None:
        """The batch has ended; what of it was not looked at is to come again."""
        rest = slice(landing.verified, None)
        missed = landing.taken[rest]
        self._wanted.put_back(landing.rows[rest][missed], landing.columns.layers[rest][missed])
        self._unpin(self._wanted.release(landing.held))

    def keep_waiting(self, now: float) -> None:
        """The pages whose turn has not come are not stalled: a slow link takes long for those before them."""
        self._keeper.catalog.keep(self._wanted.of(self._wanted.open_rows), now)

    def _unpin(self, pages: list[Page]) -> None:
        self._keeper.catalog.pins.release(pages)

    # ------------------------------------------------------------ ends

    def _give_up(self, rows: Ints, free_at: float) -> None:
        for page in self._wanted.of(rows):
            self._keeper.catalog.fail(page, free_at)
            if free_at == FOREVER:
                self._lent.append(page)
        self._unpin(self._wanted.let_go(rows))

    def end(self, problem: str, now: float) -> None:
        """No more will come for the push; ``problem`` is empty when the sender is through.

        A sender that is through has nothing on its way; one that broke off may still be writing for a moment.
        """
        free_at = now + QUARANTINE_S if problem and self.lends else now
        self._give_up(self._wanted.open_rows, free_at)
        for page in self._lent:
            self._keeper.catalog.fail(page, free_at)
        self._lent.clear()
        self._let_go()
        self._keeper.progress(now)
        if problem:
            self._keeper.transfers.fail(self.transfer, problem, now)
        else:
            self._keeper.no_more(self.transfer, now)
