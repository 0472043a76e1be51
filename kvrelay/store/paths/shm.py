"""Copies straight into the arena of a store on the same machine, which is mapped here.

It must never write into a slot whose generation has moved on, nor say that it has written before it has.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path as FilePath

import numpy as np

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import Incompatible, Lost, Malformed
from kvrelay.protocol.peer import ArenaFound, FindArena, Met, Probe, Probed
from kvrelay.store.arena import Arena, checksums
from kvrelay.store.batch import Batch
from kvrelay.store.paths.line import Line
from kvrelay.store.reception import PROBE_FORMAT
from kvrelay.types import PageFormat, Transport


class SharedMemory:
    """The arenas of one peer, mapped as they are needed."""

    transport = Transport.SHM

    def __init__(self, line: Line, link: Channel, ticket: bytes) -> None:
        self._line = line
        self._link = link
        self._ticket = ticket
        self._arenas: dict[PageFormat, Arena] = {}
        self._mapping = asyncio.Lock()
        self._probes: tuple[Arena, int] | None = None

    @classmethod
    async def open(cls, line: Line, key: bytes, sender: str, met: Met) -> SharedMemory:
        """Raises ``Lost`` when the peer is on another machine, ``Refused``, ``Malformed``."""
        if not _is_socket_here(met.socket):
            raise Lost("the peer is on another machine, or in another container")
        link = await channel.connect(FilePath(met.socket), key, sender=sender, purpose="map")
        return cls(line, link, met.ticket)

    def __repr__(self) -> str:
        return f"<SharedMemory of {self._line.link.peer}, {len(self._arenas)} arenas>"

    def takes(self, batch: Batch) -> bool:
        return batch.has_lent_slots

    async def probe(self, pattern: memoryview) -> bool:
        if self._probes is None:
            arena, found = await self._map(None)
            self._probes = (arena, found.slot)
        arena, slot = self._probes
        arena.span(slot, 0, 1)[: len(pattern)] = pattern
        (checksum,) = checksums(pattern, len(pattern))
        probed = await self._line.ask(
            lambda serial: Probe(serial=serial, size_bytes=len(pattern), checksum=checksum, written=True), Probed
        )
        return probed.good

    async def carry(self, batch: Batch) -> int:
        if self._link.over.done():
            raise Lost(f"the arenas of {self._line.link.peer} are not mapped any more")
        _copy(batch, await self._arena(batch.arena.format))
        await self._line.confirmed(batch.written(self.transport))
        return 0

    async def _arena(self, format: PageFormat) -> Arena:
        async with self._mapping:
            if format not in self._arenas:
                self._arenas[format] = (await self._map(format))[0]
        return self._arenas[format]

    async def _map(self, format: PageFormat | None) -> tuple[Arena, ArenaFound]:
        async with channel.in_time(self._line.link.peer):
            await self._link.send(FindArena(serial=self._line.serial(), format=format, ticket=self._ticket))
            found = await channel.expect(self._link, ArenaFound)
        fds, wanted = self._link.take_fds(), format or PROBE_FORMAT
        if len(fds) != 1 or found.format != wanted:
            for fd in fds:
                os.close(fd)
            raise Malformed(f"{self._line.link.peer} passed {len(fds)} arenas of {found.format}, not one of {wanted}")
        try:
            arena = Arena.attach(fds[0], found.format)
        except (OSError, Incompatible) as error:
            raise Lost(f"the arena of {self._line.link.peer} cannot be mapped: {error}") from error
        if not 0 <= found.slot < arena.slots:
            raise Malformed(f"{self._line.link.peer} lends slot {found.slot}, which its arena has not")
        return arena, found

    def close(self) -> None:
        self._link.close()
        self._arenas.clear()
        self._probes = None


def _is_socket_here(path: str) -> bool:
    """Whether there is a socket at ``path``, a name from another machine: here it may be anything, or forbidden."""
    try:
        return bool(path) and FilePath(path).is_socket()
    except OSError:
        return False


def _copy(batch: Batch, arena: Arena) -> None:
    runs = batch.runs
    known = np.flatnonzero((runs.targets >= 0) & (runs.targets < arena.slots))
    # What the peer gave up meanwhile stays untouched; it does not look at it any more either.
    known = known[arena.current(runs.targets[known], runs.generations[known])]
    here = batch.views
    there = arena.pieces(runs.targets[known] * arena.stride + runs.starts[known], runs.sizes[known])
    for at, target in zip(known.tolist(), there, strict=True):
        target[:] = here[at]
