"""One push as its receiver sees it: which pages are on their way, and where the bytes of each batch go.

It must never publish a layer whose checksum does not hold, nor free a slot that somebody may still write into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from kvrelay.errors import Malformed
from kvrelay.protocol.client import NewPage
from kvrelay.protocol.peer import Segment, Segments, Written
from kvrelay.store.arena import SlotState, checksums
from kvrelay.store.catalog import QUARANTINE_S
from kvrelay.store.keeper import Keeper
from kvrelay.store.packing import MAX_PACKED_BYTES
from kvrelay.store.page import FOREVER, Page, Writer
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer
from kvrelay.types import Codec, PageFormat, PageName, SlotRef

KEEP_S = 1.0
"""While batches come, the pages that wait are noted as alive so often: with each batch it would be work for nothing."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A page on its way: pinned, with the layers whose bytes did not come yet, and those not verified yet."""

    page: Page
    layers: frozenset[int]
    unverified: int
    landing: int = 0
    """Batches that are being received into its slot: it stays pinned while there are any."""
    is_given_up: bool = False

    def takes(self, layers: list[int]) -> bool:
        """Whether all of ``layers`` are still to come, each once; from now on they are not."""
        given = frozenset(layers)
        fits = len(given) == len(layers) and given <= self.layers
        if fits:
            self.layers -= given
            self.landing += 1
        return fits


@dataclass(slots=True)
class Landing:
    """Where the segments of one page in one batch go; nobody wants them (any more) when ``wanted`` is None."""

    index: int
    layers: list[int]
    checksums: list[list[int]]
    """Of each segment's shards."""
    views: list[memoryview]
    wanted: Wanted | None

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.views))


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
        self._wanted: dict[int, Wanted] = {}
        self._kept_at = float("-inf")
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

    def tokens(self, index: int) -> int:
        """Valid tokens of a page of the prompt. Raises ``Malformed``."""
        if not 0 <= index < len(self._names):
            raise Malformed(f"{self.transfer.id} has no page {index}")
        return self._shelf.arena.format.tokens_of(index, self._total_tokens)

    # ------------------------------------------------------------ offers

    def want(self, offered: list[int], shards: int, now: float) -> tuple[list[int], list[SlotRef]]:
        """Make room for the pages that are lacking here; which of them should be sent, and their slots."""
        catalog = self._keeper.catalog
        tokens = {index: self.tokens(index) for index in offered}
        names = self._names
        lacking = [index for index in offered if index not in self._wanted and catalog.find(names[index]) is None]
        if not self.transfer.is_open:
            return [], []
        refs = catalog.grant(self._writer, self._shelf, len(lacking), now)
        wanted, refused = lacking[: len(refs)], lacking[len(refs) :]
        all_layers = frozenset(range(self._shelf.arena.format.layers))
        for index, ref in zip(wanted, refs, strict=True):
            parent = catalog.find(self._names[index - 1]) if index else None
            new = NewPage(self._names[index], ref, tokens[index], shards=shards)
            page = self._keeper.begin(self._writer, new, parent, now)
            assert page is not None  # just granted
            catalog.pin(page, now)
            self._wanted[index] = Wanted(page, all_layers, len(all_layers))
        if refused:
            self._keeper.transfers.give_up(self.transfer, self.names(refused), now)
        return wanted, refs

    # ------------------------------------------------------------ batches

    def land(self, message: Segments | Written, waste: Callable[[int], list[memoryview]]) -> list[Landing]:
        """A place for every segment. Raises ``Malformed`` when they do not add up to the payload."""
        self._check(message)
        landings: list[Landing] = []
        try:
            for index, items in groupby(message.items, attrgetter("page")):
                landings.append(self._place(index, list(items), waste))
        except Malformed:
            self.missed(landings)
            raise
        return landings

    def _check(self, message: Segments | Written) -> None:
        """Before anything is made for it: what it claims is bounded by a payload, or by what codecs may unpack."""
        shards = {len(item.checksums) for item in message.items}
        if len(shards) != 1 or 0 in shards:
            raise Malformed(f"segments of {message.transfer} of unlike numbers of shards, or of none, came together")
        raw_bytes = sum(self.tokens(item.page) for item in message.items) * self.format.token_layer_bytes
        codec = message.codec if isinstance(message, Segments) else Codec.RAW
        if codec not in (Codec.RAW, self.codec):
            raise Malformed(f"segments of {message.transfer} come in {codec}, which was not agreed on")
        if codec is Codec.RAW and message.payload_bytes != raw_bytes:
            raise Malformed(f"segments of {message.transfer} do not add up to its payload")
        if codec is not Codec.RAW and not message.payload_bytes < raw_bytes <= MAX_PACKED_BYTES:
            raise Malformed(f"segments of {message.transfer}, {raw_bytes} bytes, come as {message.payload_bytes}")

    def _place(self, index: int, items: list[Segment], waste: Callable[[int], list[memoryview]]) -> Landing:
        """Slots for the layers of one page; its layers that are in already must not be written again."""
        arena, tokens = self._shelf.arena, self.tokens(index)
        layers, sums = [item.layer for item in items], [item.checksums for item in items]
        wanted = self._wanted.get(index)
        if wanted is not None and len(sums[0]) != wanted.page.shards:
            raise Malformed(f"segments of page {index} do not have a checksum for each of its shards")
        if wanted is None or wanted.page.state is not SlotState.FILLING or not wanted.takes(layers):
            return Landing(index, layers, sums, waste(len(items) * tokens * arena.format.token_layer_bytes), None)
        return Landing(index, layers, sums, arena.views(wanted.page.ref.slot, layers, tokens), wanted)

    def missed(self, landings: list[Landing]) -> None:
        """A batch did not come through: its layers are to come again."""
        for landing in landings:
            if landing.wanted is not None:
                landing.wanted.layers |= frozenset(landing.layers)
                self._landed(landing.wanted)

    def arrived(self, landings: list[Landing], now: float) -> list[int]:
        """A batch is in: publish the segments that hold what their sender says. The pages of the others, given up."""
        taken = [(landing, landing.wanted) for landing in landings if landing.wanted is not None]
        sound: list[tuple[Landing, Wanted]] = []
        damaged: set[int] = set()
        for landing, wanted in taken:
            if _is_sound(landing, wanted.page):
                sound.append((landing, wanted))
            else:
                damaged.add(landing.index)
        self._shelf.arena.publish_segments(
            [(wanted.page.ref, layer) for landing, wanted in sound for layer in landing.layers],
            [each for landing, _ in sound for each in landing.checksums],
        )
        self._verified(sound)
        for index in damaged:
            self._keeper.counts.add("checksum_failures")
            self._give_up(index, FOREVER if self.lends else now)
        for _landing, wanted in taken:
            self._landed(wanted)
        self._keep_waiting(now)
        return sorted(damaged)

    def _keep_waiting(self, now: float) -> None:
        """The pages whose turn has not come are not stalled: a slow link takes long for those before them."""
        if now - self._kept_at >= KEEP_S:
            self._kept_at = now
            pages = [wanted.page for wanted in self._wanted.values()]
            self._keeper.catalog.filling(self._shelf).keep(pages, now)

    def _verified(self, sound: list[tuple[Landing, Wanted]]) -> None:
        """Let go of the pages of which nothing more is to come."""
        done = 0
        for landing, wanted in sound:
            wanted.unverified -= len(landing.layers)
            if wanted.unverified == 0 and not wanted.is_given_up:
                del self._wanted[landing.index]
                self._let_go(wanted)
                done += 1
        self._keeper.counts.add("pages_received", done)
        self.transfer.traffic.pages += done

    def _landed(self, wanted: Wanted) -> None:
        wanted.landing -= 1
        self._unpin_idle(wanted)

    def _let_go(self, wanted: Wanted) -> None:
        """Nothing more is expected of the page."""
        wanted.is_given_up = True
        self._unpin_idle(wanted)

    def _unpin_idle(self, wanted: Wanted) -> None:
        if wanted.is_given_up and wanted.landing == 0:
            self._keeper.catalog.unpin(wanted.page)

    # ------------------------------------------------------------ ends

    def _give_up(self, index: int, free_at: float) -> None:
        wanted = self._wanted.pop(index, None)
        if wanted is not None:
            self._keeper.catalog.fail(wanted.page, free_at)
            if free_at == FOREVER:
                self._lent.append(wanted.page)
            self._let_go(wanted)

    def end(self, problem: str, now: float) -> None:
        """No more will come for the push; ``problem`` is empty when the sender is through.

        A sender that is through has nothing on its way; one that broke off may still be writing for a moment.
        """
        free_at = now + QUARANTINE_S if problem and self.lends else now
        for index in list(self._wanted):
            self._give_up(index, free_at)
        for page in self._lent:
            self._keeper.catalog.fail(page, free_at)
        self._lent.clear()
        self._keeper.progress(now)
        if problem:
            self._keeper.transfers.fail(self.transfer, problem, now)
        else:
            self._keeper.no_more(self.transfer, now)


def fill(landings: list[Landing], raw: memoryview, *, are_rounded: bool) -> None:
    """Copy decoded bytes to where they belong. Rounded ones get the checksums that they have now."""
    start = 0
    for landing in landings:
        part = raw[start : start + landing.size_bytes]
        start += len(part)
        if landing.wanted is None:
            continue
        if are_rounded:
            shards = len(landing.checksums[0])
            sums = checksums(part, len(part) // (shards * len(landing.layers)))
            landing.checksums = [sums[at : at + shards] for at in range(0, len(sums), shards)]
        for view in landing.views:
            view[:] = part[: len(view)]
            part = part[len(view) :]


def _is_sound(landing: Landing, page: Page) -> bool:
    size = sum(map(len, landing.views)) // (len(landing.layers) * page.shards)
    expected = [checksum for sums in landing.checksums for checksum in sums]
    return [checksum for view in landing.views for checksum in checksums(view, size)] == expected
