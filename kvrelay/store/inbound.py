"""The receiving end of a peer store's links: pages are received straight into their slots, then verified.

Payload comes over the link of the pushes, over further links of the same peer, or was written by the peer itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.channel import Channel
from kvrelay.errors import Malformed, Refused
from kvrelay.protocol.frame import MAX_PAYLOAD_BYTES
from kvrelay.protocol.peer import (
    FindArena,
    Meet,
    Nudge,
    Probe,
    Probed,
    PushClosed,
    PushDamaged,
    PushNews,
    PushOpen,
    PushPages,
    PushWanted,
    Segments,
    Taken,
    Written,
)
from kvrelay.race import until_one_ends
from kvrelay.store.arena import checksums
from kvrelay.store.catalog import QUARANTINE_S
from kvrelay.store.codecs import Codecs
from kvrelay.store.incoming import Incoming
from kvrelay.store.keeper import Keeper, check_shards
from kvrelay.store.landing import Landing, check_size
from kvrelay.store.packing import unpack
from kvrelay.store.paths.trial import MAX_PROBE_BYTES
from kvrelay.store.reception import Reception, Visit
from kvrelay.store.transfers import Way
from kvrelay.store.underway import UnderWay
from kvrelay.store.waste import Waste
from kvrelay.types import LOSSY, Codec, PageName, Transport

MAX_INCOMING = 1024
"""Open pushes on one link."""
KEEP_S = 1.0
"""While bytes come, the pages that wait are noted as alive so often: with each batch it would be work for nothing."""


class Inbound:
    """One peer's links."""

    def __init__(
        self,
        link: Channel,
        keeper: Keeper,
        reception: Reception,
        codecs: Codecs,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._keeper = keeper
        self._reception = reception
        self._codecs = codecs
        self._stall_s = stall_s
        self._clock = clock
        self._incoming: dict[str, Incoming] = {}
        self._under_way = UnderWay()
        self._writer = keeper.join(f"peer {link.peer}", clock())
        self._visit = Visit(self.serve_data)
        self._waste = Waste()
        self._lent = False
        self._kept_at = float("-inf")
        self._news = asyncio.Event()
        """Pages of a push came or were given up."""

    def __repr__(self) -> str:
        return f"<Inbound from {self._link.peer}, {len(self._incoming)} pushes, {self._visit!r}>"

    async def serve(self) -> None:
        """Receive until the peer is gone; what it left unfinished fails."""
        try:
            await until_one_ends(self._receive(), self._tell())
        finally:
            self._reception.leave(self._visit)
            for incoming in list(self._incoming.values()):
                self._end(incoming, "the link to the sending store broke")
            self._keeper.leave(self._writer, self._clock(), quarantine_s=QUARANTINE_S if self._lent else 0)

    async def _receive(self) -> None:
        while True:
            await self._handle()
            await asyncio.sleep(0)  # a sender that never pauses must not keep the loop from everybody else

    async def _tell(self) -> None:
        """Say what became of pages that others were bringing: the peer holds them so long."""
        while True:
            await self._news.wait()
            self._news.clear()
            for incoming in list(self._incoming.values()):
                over, lacking = incoming.news()
                if over or lacking:
                    news = PushNews(transfer=incoming.transfer.id, over=over, lacking=lacking)
                    await self._link.send(news, stall_s=self._stall_s)

    async def serve_data(self, link: Channel) -> None:
        """Receive over a further link of the peer until that ends. Raises ``Lost``, ``Malformed``."""
        while True:
            match await link.recv():
                case Segments() as message:
                    await self._take(link, message)
                case Probe(written=False) as message:
                    await self._try(link, message)
                case message:
                    raise Malformed(f"a peer sent {type(message).__name__} over a data link")
            await asyncio.sleep(0)

    async def _handle(self) -> None:
        match await self._link.recv():
            case PushOpen() as message:
                await self._open(message)
            case PushPages() as message:
                await self._offered(message)
            case Segments() as message:
                await self._take(self._link, message)
            case Written() as message:
                await self._take(None, message)
            case PushClosed() as message:
                self._closed(message)
            case Meet() | FindArena() | Nudge() | Probe() as message:
                await self._meet(message)
            case message:
                raise Malformed(f"a peer sent {type(message).__name__}")

    async def _open(self, message: PushOpen) -> None:
        refusal = "it is known here already, or too many are open"
        try:
            is_open = self._begin(message)
        except Refused as error:
            is_open, refusal = False, str(error)
        if not is_open:
            await self._link.send(PushClosed(transfer=message.transfer, complete=False, reason=refusal))

    def _begin(self, message: PushOpen) -> bool:
        if message.transfer in self._incoming or len(self._incoming) >= MAX_INCOMING:
            return False
        shelf = self._keeper.room.shelf(message.format)
        transfer = self._keeper.open_transfer(
            message.transfer, self._writer, message.names, message.total_tokens, shelf, Way.IN, self._clock()
        )
        if transfer is not None:
            self._lent |= message.direct
            incoming = self._incoming[transfer.id] = Incoming(
                transfer,
                shelf,
                message.names,
                message.total_tokens,
                self._keeper,
                self._writer,
                lends=message.direct,
                codec=self._codecs.accept(message.codec, message.format),
            )
            incoming.begin(self._clock())
        return transfer is not None

    async def _offered(self, message: PushPages) -> None:
        incoming = self._incoming.get(message.transfer)
        if incoming is None:
            return  # refused or ended here; the sender has been told, or will be
        check_shards(message.shards, incoming.kv_heads)
        wish = incoming.want(list(dict.fromkeys(message.indices)), message.shards, self._clock())
        answer = PushWanted(
            transfer=message.transfer,
            indices=wish.pages,
            slots=wish.slots if incoming.lends else [],
            codec=incoming.codec,
            elsewhere=wish.elsewhere,
        )
        if wish.elsewhere:
            incoming.transfer.tell = self._news.set
        await self._link.send(answer, stall_s=self._stall_s)

    # ------------------------------------------------------------ payload

    async def _take(self, link: Channel | None, message: Segments | Written) -> None:
        """A batch comes over ``link``, or the peer has written it: receive and verify it, and say that it was taken."""
        check_size(message.payload_bytes, MAX_PAYLOAD_BYTES)
        await self._under_way.supersede(message.serial)
        incoming, damaged = self._incoming.get(message.transfer), list[PageName]()
        if incoming is not None:
            with self._under_way.receiving(message.serial, link):
                damaged = await self._land(link, message, incoming)
        elif link is not None:
            await link.recv_into(self._waste.views(message.payload_bytes), stall_s=self._stall_s)
        await self._answer(message.serial, damaged)

    async def _answer(self, serial: int, damaged: list[PageName]) -> None:
        if damaged:
            await self._link.send(PushDamaged(names=damaged), stall_s=self._stall_s)
        await self._link.send(Taken(serial=serial), stall_s=self._stall_s)

    async def _land(self, link: Channel | None, message: Segments | Written, incoming: Incoming) -> list[PageName]:
        """Receive what is still to come of a batch, and verify all of it; the pages that were damaged."""
        if isinstance(message, Written) and not incoming.lends:
            raise Malformed(f"{message.transfer} was opened without slots to write into")
        landing = incoming.land(message)
        try:
            self._keeper.transfers.touch(incoming.transfer.id, self._clock())
            transport = message.transport if isinstance(message, Written) else Transport.TCP
            incoming.transfer.traffic.begin(transport, self._clock())
            if isinstance(message, Written):
                self._count(incoming, message.payload_bytes, landing.runs)
            elif link is not None and message.codec is not Codec.RAW:
                await self._unpack(link, message, incoming, landing)
                link = None
            return incoming.names(sorted(set(await self._verify(incoming, landing, link))))
        finally:
            incoming.landed(landing)

    async def _verify(self, incoming: Incoming, landing: Landing, link: Channel | None) -> list[int]:
        """Verify a batch, piece by piece; each comes over ``link`` before, if there is one. The pages that are damaged.

        Others have their turn before and after each: to take in all that a peer may send at once takes long.
        """
        damaged: list[int] = []
        for part in landing.pieces():
            if link is not None:
                await link.recv_into(landing.views(part, self._waste.views), stall_s=self._stall_s)
                self._count(incoming, landing.size_bytes(part), 0 if part.start else landing.runs)
                await asyncio.sleep(0)
            damaged += incoming.verify(landing, part, self._clock())
            await asyncio.sleep(0)
        return damaged

    async def _unpack(self, link: Channel, message: Segments, incoming: Incoming, landing: Landing) -> None:
        """Receive an encoded payload; decoded on a thread, in memory of its own, it is copied into the slots here.

        One that was damaged on its way is not: its pages are then found unsound.
        """
        payload = memoryview(bytearray(message.payload_bytes))
        await link.recv_into([payload], stall_s=self._stall_s)
        raw_bytes = int(landing.ends[-1])
        raw = await asyncio.to_thread(unpack, message.codec, payload, message.wire_checksum, raw_bytes, incoming.format)
        if raw is not None:
            self._count(incoming, len(payload), landing.runs)
            landing.fill(raw.data, are_rounded=message.codec in LOSSY)
            self._keeper.counts.add("codec_bytes_saved", raw_bytes - len(payload))

    def _count(self, incoming: Incoming, size_bytes: int, runs: int) -> None:
        """Bytes came in; before they are verified, because the last of them end the transfer."""
        incoming.transfer.traffic.add(size_bytes, runs)
        self._keeper.counts.add("bytes_received", size_bytes)
        self._keeper.transfers.touch(incoming.transfer.id, self._clock())
        self._keep_waiting(self._clock())

    def _keep_waiting(self, now: float) -> None:
        """All pushes of the peer share its links: whichever has its turn, the pages of the others only wait."""
        if now - self._kept_at >= KEEP_S:
            self._kept_at = now
            for incoming in self._incoming.values():
                incoming.keep_waiting(now)

    # ------------------------------------------------------------ paths

    async def _meet(self, message: Meet | FindArena | Nudge | Probe) -> None:
        match message:
            case Meet():
                await self._link.send(self._reception.admit(self._visit, message), stall_s=self._stall_s)
            case FindArena():
                await self._link.send(self._reception.arena(self._visit, message), stall_s=self._stall_s)
            case Nudge():
                self._reception.nudge()
            case Probe():
                await self._try(self._link, message)

    async def _try(self, link: Channel, probe: Probe) -> None:
        """A test pattern: does it arrive whole?"""
        check_size(probe.size_bytes, MAX_PROBE_BYTES)
        if probe.written:
            found = self._reception.written(self._visit, probe.size_bytes)
        else:
            found = memoryview(bytearray(probe.size_bytes))
            await link.recv_into([found], stall_s=self._stall_s)
        good = checksums(found, probe.size_bytes) == [probe.checksum]
        await self._link.send(Probed(serial=probe.serial, good=good), stall_s=self._stall_s)

    # ------------------------------------------------------------ ends

    def _closed(self, message: PushClosed) -> None:
        incoming = self._incoming.get(message.transfer)
        if incoming is not None:
            self._end(incoming, "" if message.complete else message.reason or "the sender gave up")

    def _end(self, incoming: Incoming, problem: str) -> None:
        """No more will come on these links for the push; ``problem`` is empty when the sender is through."""
        del self._incoming[incoming.transfer.id]
        incoming.end(problem, self._clock())
