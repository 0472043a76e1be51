"""Several TCP links beside that of the pushes: payload goes from arena to arena, and holds up no message.

A batch is never left half sent: when its stream breaks, it is begun again on another one.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Lost
from kvrelay.protocol.peer import Join, Met, Probe, Probed, Segments, Taken
from kvrelay.store.arena import checksums
from kvrelay.store.batch import Batch
from kvrelay.store.paths.line import Line
from kvrelay.types import Codec, Transport


class Streams:
    """Data links to one peer; each batch goes over the one with the least to do."""

    transport = Transport.TCP

    def __init__(self, line: Line, links: list[Channel]) -> None:
        self._line = line
        self._load = dict.fromkeys(links, 0)
        for link in links:
            line.spawn(_watch(link))

    @classmethod
    async def open(cls, line: Line, address: str, key: bytes, sender: str, met: Met, count: int) -> Streams:
        """Dial ``count`` links, all at the same time. Raises ``Lost``, ``Refused``, ``Malformed``."""
        links: list[Channel] = []

        async def dial() -> None:
            link = await channel.connect(address, key, sender=sender, purpose="data")
            links.append(link)
            await link.send(Join(ticket=met.ticket), stall_s=line.stall_s)

        dials = [asyncio.ensure_future(dial()) for _ in range(count)]
        try:
            await asyncio.gather(*dials)
        except BaseException:
            for each in dials:
                each.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
            for link in links:
                link.close()
            raise
        return cls(line, links)

    def __repr__(self) -> str:
        alive = sum(not link.over.done() for link in self._load)
        return f"<Streams to {self._line.link.peer}, {alive} of {len(self._load)} open>"

    def takes(self, batch: Batch) -> bool:
        return True

    async def probe(self, pattern: memoryview) -> bool:
        """All streams carry a part of it at the same time."""
        step = -(-len(pattern) // len(self._load))
        parts = [pattern[start : start + step] for start in range(0, len(pattern), step)]
        found = await asyncio.gather(*map(self._probe, self._load, parts))
        return all(found)

    async def _probe(self, link: Channel, part: memoryview) -> bool:
        serial = self._line.serial()
        (checksum,) = checksums(part, len(part))
        probe = Probe(serial=serial, size_bytes=len(part), checksum=checksum)
        return (await self._line.deliver(link, serial, probe, [part], Probed)).good

    async def carry(self, batch: Batch) -> int:
        message, payload = await _on_the_wire(self._line, batch)
        restarts = 0
        while True:
            try:
                await self._send(self._least_loaded(), message, payload)
                return restarts
            except Lost:
                restarts += 1
                if all(link.over.done() for link in self._load):
                    raise

    def _least_loaded(self) -> Channel:
        alive = [link for link in self._load if not link.over.done()]
        if not alive:
            raise Lost(f"no data stream to {self._line.link.peer} is left")
        return min(alive, key=self._load.__getitem__)

    async def _send(self, link: Channel, message: Segments, payload: list[memoryview]) -> None:
        self._load[link] += message.payload_bytes
        try:
            await self._line.deliver(link, message.serial, message, payload, Taken)
        finally:
            self._load[link] -= message.payload_bytes

    def close(self) -> None:
        for link in self._load:
            link.close()


class ControlLink:
    """The link of the pushes itself: always there, and the last to be taken."""

    transport = Transport.TCP

    def __init__(self, line: Line) -> None:
        self._line = line

    def __repr__(self) -> str:
        return f"<ControlLink to {self._line.link.peer}>"

    def takes(self, batch: Batch) -> bool:
        return True

    async def probe(self, pattern: memoryview) -> bool:
        serial = self._line.serial()
        (checksum,) = checksums(pattern, len(pattern))
        probe = Probe(serial=serial, size_bytes=len(pattern), checksum=checksum)
        return (await self._line.deliver(self._line.link, serial, probe, [pattern], Probed)).good

    async def carry(self, batch: Batch) -> int:
        message, payload = await _on_the_wire(self._line, batch)
        await self._line.deliver(self._line.link, message.serial, message, payload, Taken)
        return 0

    def close(self) -> None:
        self._line.link.close()


async def _on_the_wire(line: Line, batch: Batch) -> tuple[Segments, list[memoryview]]:
    """``batch`` as it travels: as it is, or encoded."""
    if batch.codec is Codec.RAW:
        return batch.message, batch.views
    sums = batch.columns.checksums.tolist()
    packed = await line.codecs.pack(batch.codec, batch.views, sums, batch.arena.format)
    if packed is None:
        return batch.message, batch.views
    message = msgspec.structs.replace(
        batch.message, payload_bytes=packed.size_bytes, codec=batch.codec, wire_checksum=packed.checksum
    )
    return message, [memoryview(piece) for piece in packed.pieces]


async def _watch(link: Channel) -> None:
    """Notice the end of a link on which the peer says nothing."""
    with contextlib.suppress(KvrelayError):
        while True:
            await link.recv()
    link.close()
