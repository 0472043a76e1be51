"""The receiving end of a peer store's link: pages are received straight into their slots, then verified.

It must never publish a layer whose checksum does not hold, nor write into a slot it does not hold a pin on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from kvrelay.channel import Channel
from kvrelay.errors import Malformed, Refused
from kvrelay.protocol import (
    MAX_PAYLOAD_BYTES,
    NewPage,
    PushClosed,
    PushDamaged,
    PushOpen,
    PushPages,
    PushWanted,
    Segment,
    Segments,
)
from kvrelay.store.arena import SlotState, checksums
from kvrelay.store.keeper import Keeper, check_shards
from kvrelay.store.page import Page
from kvrelay.store.shelf import Shelf
from kvrelay.store.transfers import Transfer, Way
from kvrelay.types import PageName, Transport

MAX_INCOMING = 1024
"""Open pushes on one link."""


@dataclass(slots=True)
class Wanted:
    """A page on its way: pinned, with the layers whose bytes did not come yet, and those not verified yet."""

    page: Page
    layers: frozenset[int]
    unverified: int

    def takes(self, layers: list[int]) -> bool:
        """Whether all of ``layers`` are still to come, each once; from now on they are not."""
        given = frozenset(layers)
        fits = len(given) == len(layers) and given <= self.layers
        if fits:
            self.layers -= given
        return fits


@dataclass(slots=True)
class Incoming:
    """One push as its receiver sees it."""

    transfer: Transfer
    shelf: Shelf
    names: list[PageName]
    total_tokens: int
    wanted: dict[int, Wanted] = field(default_factory=dict)

    def tokens(self, index: int) -> int:
        """Valid tokens of a page of the prompt. Raises ``Malformed``."""
        if not 0 <= index < len(self.names):
            raise Malformed(f"{self.transfer.id} has no page {index}")
        return self.shelf.arena.format.tokens_of(index, self.total_tokens)


@dataclass(slots=True)
class Landing:
    """Where the segments of one page in one message go; no page when nobody wants them (any more)."""

    index: int
    layers: list[int]
    checksums: list[list[int]]
    """Of each segment's shards."""
    views: list[memoryview]
    page: Page | None


class Inbound:
    """One peer's link."""

    def __init__(self, link: Channel, keeper: Keeper, stall_s: float, clock: Callable[[], float]) -> None:
        self._link = link
        self._keeper = keeper
        self._stall_s = stall_s
        self._clock = clock
        self._incoming: dict[str, Incoming] = {}
        self._writer = keeper.join(f"peer {link.peer}", clock())
        self._scratch = bytearray()

    def __repr__(self) -> str:
        return f"<Inbound from {self._link.peer}, {len(self._incoming)} pushes>"

    async def serve(self) -> None:
        """Receive until the peer is gone; what it left unfinished fails."""
        try:
            while True:
                await self._handle()
                await asyncio.sleep(0)  # a sender that never pauses must not keep the loop from everybody else
        finally:
            for incoming in list(self._incoming.values()):
                self._end(incoming, "the link to the sending store broke")
            self._keeper.leave(self._writer, self._clock(), quarantine_s=0)

    async def _handle(self) -> None:
        match await self._link.recv():
            case PushOpen() as message:
                await self._open(message)
            case PushPages() as message:
                await self._offered(message)
            case Segments() as message:
                await self._receive(message)
            case PushClosed() as message:
                self._closed(message)
            case message:
                raise Malformed(f"a peer sent {type(message).__name__}")

    async def _open(self, message: PushOpen) -> None:
        refusal = "it is known here already, or too many are open"
        try:
            transfer = self._begin(message)
        except Refused as error:
            transfer, refusal = None, str(error)
        if transfer is None:
            await self._link.send(PushClosed(transfer=message.transfer, complete=False, reason=refusal))

    def _begin(self, message: PushOpen) -> Transfer | None:
        if len(self._incoming) >= MAX_INCOMING:
            return None
        shelf = self._keeper.room.shelf(message.format)
        transfer = self._keeper.open_transfer(
            message.transfer, self._writer, message.names, message.total_tokens, shelf, Way.IN, self._clock()
        )
        if transfer is not None:
            self._incoming[transfer.id] = Incoming(transfer, shelf, message.names, message.total_tokens)
        return transfer

    async def _offered(self, message: PushPages) -> None:
        incoming = self._incoming.get(message.transfer)
        if incoming is None:
            return  # refused or ended here; the sender has been told, or will be
        check_shards(message.shards, incoming.shelf.arena.format.kv_heads)
        wanted = self._want(incoming, list(dict.fromkeys(message.indices)), message.shards)
        await self._link.send(PushWanted(transfer=message.transfer, indices=wanted), stall_s=self._stall_s)

    def _want(self, incoming: Incoming, offered: list[int], shards: int) -> list[int]:
        """Make room for the pages that are lacking here; which of them should be sent."""
        catalog, now = self._keeper.catalog, self._clock()
        tokens = {index: incoming.tokens(index) for index in offered}
        lacking = [index for index in offered if catalog.find(incoming.names[index]) is None]
        if not incoming.transfer.is_open:
            return []
        refs = catalog.grant(self._writer, incoming.shelf, len(lacking), now)
        wanted, refused = lacking[: len(refs)], lacking[len(refs) :]
        all_layers = frozenset(range(incoming.shelf.arena.format.layers))
        for index, ref in zip(wanted, refs, strict=True):
            parent = catalog.find(incoming.names[index - 1]) if index else None
            new = NewPage(incoming.names[index], ref, tokens[index], shards=shards)
            page = self._keeper.begin(self._writer, new, parent, now)
            assert page is not None  # just granted
            catalog.pin(page, now)
            incoming.wanted[index] = Wanted(page, all_layers, len(all_layers))
        if refused:
            self._keeper.transfers.give_up(incoming.transfer, [incoming.names[index] for index in refused], now)
        return wanted

    # ------------------------------------------------------------ payload

    async def _receive(self, message: Segments) -> None:
        if not 0 < message.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise Malformed(f"a payload of {message.payload_bytes} bytes is not taken")
        incoming = self._incoming.get(message.transfer)
        if incoming is None:
            await self._link.recv_into(self._waste(message.payload_bytes), stall_s=self._stall_s)
            return
        landings = self._land(incoming, message)
        views = [view for landing in landings for view in landing.views]
        traffic = incoming.transfer.traffic
        self._keeper.transfers.touch(incoming.transfer.id, self._clock())
        with traffic.arriving(Transport.TCP, self._clock):
            await self._link.recv_into(views, stall_s=self._stall_s)
        traffic.add(message.payload_bytes, len(views))
        self._keeper.counts.add("bytes_received", message.payload_bytes)
        self._keeper.transfers.touch(incoming.transfer.id, self._clock())
        damaged = self._verify(incoming, landings)
        self._keeper.progress(self._clock())
        if damaged:
            names = [incoming.names[index] for index in sorted(damaged)]
            await self._link.send(PushDamaged(names=names), stall_s=self._stall_s)

    def _waste(self, size: int) -> list[memoryview]:
        """Views of ``size`` bytes in all that nobody will read."""
        chunk = 1 << 20
        if len(self._scratch) < chunk:
            self._scratch = bytearray(chunk)
        whole = memoryview(self._scratch)[:chunk]
        return [whole] * (size // chunk) + [whole[: size % chunk]]

    def _land(self, incoming: Incoming, message: Segments) -> list[Landing]:
        """A place for every segment. Raises ``Malformed`` when they do not add up to the payload."""
        if len({len(item.checksums) for item in message.items}) > 1:
            raise Malformed(f"segments of {message.transfer} with unlike numbers of shards came in one message")
        groups = groupby(message.items, attrgetter("page"))
        landings = [self._place(incoming, index, list(items)) for index, items in groups]
        if sum(len(view) for landing in landings for view in landing.views) != message.payload_bytes:
            raise Malformed(f"segments of {message.transfer} do not add up to its payload")
        return landings

    def _place(self, incoming: Incoming, index: int, items: list[Segment]) -> Landing:
        """Slots for the layers of one page; its layers that are in already must not be written again."""
        arena, tokens = incoming.shelf.arena, incoming.tokens(index)
        layers, checksums = [item.layer for item in items], [item.checksums for item in items]
        wanted = incoming.wanted.get(index)
        if wanted is not None and len(checksums[0]) != wanted.page.shards:
            raise Malformed(f"segments of page {index} do not have a checksum for each of its shards")
        if wanted is None or wanted.page.state is not SlotState.FILLING or not wanted.takes(layers):
            waste = self._waste(len(items) * tokens * arena.format.token_layer_bytes)
            return Landing(index, layers, checksums, waste, None)
        return Landing(index, layers, checksums, arena.views(wanted.page.ref.slot, layers, tokens), wanted.page)

    def _verify(self, incoming: Incoming, landings: list[Landing]) -> set[int]:
        """Publish the segments that hold what their sender says; the pages of the others, given up."""
        arena = incoming.shelf.arena
        taken = [(landing, landing.page) for landing in landings if landing.page is not None]
        sound = [(landing, page) for landing, page in taken if _is_sound(landing, page)]
        arena.publish_segments(
            [(page.ref, layer) for landing, page in sound for layer in landing.layers],
            [sums for landing, _ in sound for sums in landing.checksums],
        )
        self._verified(incoming, [landing for landing, _ in sound])
        damaged = {landing.index for landing, _ in taken}.difference(landing.index for landing, _ in sound)
        for index in damaged:
            self._keeper.counts.add("checksum_failures")
            self._drop(incoming, index)
        return damaged

    def _verified(self, incoming: Incoming, landings: list[Landing]) -> None:
        """Let go of the pages of which nothing more is to come."""
        done: list[int] = []
        for landing in landings:
            wanted = incoming.wanted.get(landing.index)
            if wanted is not None:
                wanted.unverified -= len(landing.layers)
                if wanted.unverified == 0:
                    done.append(landing.index)
        for index in done:
            self._keeper.catalog.unpin(incoming.wanted.pop(index).page)
        self._keeper.counts.add("pages_received", len(done))
        incoming.transfer.traffic.pages += len(done)

    # ------------------------------------------------------------ ends

    def _drop(self, incoming: Incoming, index: int) -> None:
        wanted = incoming.wanted.pop(index, None)
        if wanted is not None:
            self._keeper.catalog.fail(wanted.page, self._clock())
            self._keeper.catalog.unpin(wanted.page)

    def _closed(self, message: PushClosed) -> None:
        incoming = self._incoming.get(message.transfer)
        if incoming is not None:
            self._end(incoming, "" if message.complete else message.reason or "the sender gave up")

    def _end(self, incoming: Incoming, problem: str) -> None:
        """No more will come on this link for the push; ``problem`` is empty when the sender is through."""
        now = self._clock()
        del self._incoming[incoming.transfer.id]
        for index in list(incoming.wanted):
            self._drop(incoming, index)
        self._keeper.progress(now)
        if problem:
            self._keeper.transfers.fail(incoming.transfer, problem, now)
        else:
            self._keeper.no_more(incoming.transfer, now)


def _is_sound(landing: Landing, page: Page) -> bool:
    size = sum(map(len, landing.views)) // (len(landing.layers) * page.shards)
    expected = [checksum for sums in landing.checksums for checksum in sums]
    return [checksum for view in landing.views for checksum in checksums(view, size)] == expected
