"""One-sided writes into a peer's arena by NIXL: RDMA where there is a card, shared memory or TCP where there is none.

It must never say that it has written before it has, nor wait for a write by spinning.
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from kvrelay.errors import Lost, Malformed, Refused
from kvrelay.protocol.peer import ArenaFound, FindArena, Nudge, Probe, Probed
from kvrelay.store.arena import Arena, Ints, checksums
from kvrelay.store.batch import Batch
from kvrelay.store.paths.agent import Agent, Runs, Write
from kvrelay.store.paths.line import Line
from kvrelay.store.room import MAX_SLOTS
from kvrelay.types import PageFormat, Transport

POLL_S = 0.001
"""Between two looks at a write that was not done at once; between two on one machine it always is."""
NUDGE_S = 0.005
MAX_ADDRESS = 1 << 63
"""Above, with a page behind it, an address might not fit NIXL's 64 bits."""


class OneSided:
    """The arenas of one peer, as its agent registered them."""

    transport = Transport.NIXL

    def __init__(self, line: Line, agent: Agent, source: Arena, found: ArenaFound, refused: set[PageFormat]) -> None:
        """``refused``: formats whose arenas cannot be written from or to; it outlives this path, and grows."""
        self._line = line
        self._agent = agent
        self._source = source
        """Whence probes are written."""
        self._probes = found
        self._peer = agent.meet(found.agent)
        self._addresses: dict[PageFormat, int] = {}
        self._refused = refused
        self._finding = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def open(cls, line: Line, agent: Agent, source: Arena, refused: set[PageFormat]) -> OneSided:
        """Raises ``Lost``, ``Refused``."""
        agent.register(source)
        return cls(line, agent, source, await _find(line, None), refused)

    def __repr__(self) -> str:
        return f"<OneSided to {self._peer}, {len(self._addresses)} arenas>"

    def takes(self, batch: Batch) -> bool:
        return batch.has_lent_slots and batch.arena.format not in self._refused

    async def probe(self, pattern: memoryview) -> bool:
        self._source.span(0, 0, 1)[: len(pattern)] = pattern
        there = self._probes.address + self._probes.slot * self._source.stride
        nothing, size = np.zeros(1, np.int64), np.array([len(pattern)])
        await self._write(_runs(self._source.address, nothing, size), _runs(there, nothing, size))
        (checksum,) = checksums(pattern, len(pattern))
        probed = await self._line.ask(
            lambda serial: Probe(serial=serial, size_bytes=len(pattern), checksum=checksum, written=True), Probed
        )
        return probed.good

    async def carry(self, batch: Batch) -> int:
        arena, base = batch.arena, await self._address(batch.arena)
        runs, stride = batch.runs, arena.stride
        here = _runs(arena.address, runs.slots * stride + runs.starts, runs.sizes)
        await self._write(here, _runs(base, runs.targets * stride + runs.starts, runs.sizes))
        await self._line.confirmed(batch.written(self.transport))
        return 0

    async def _address(self, arena: Arena) -> int:
        """Where the peer's arena of this format begins. Raises ``Lost``, ``Refused``."""
        async with self._finding:
            if arena.format not in self._addresses:
                found = await self._allowed(arena)
                self._agent.meet(found.agent)
                self._addresses[arena.format] = found.address
        return self._addresses[arena.format]

    async def _allowed(self, arena: Arena) -> ArenaFound:
        """The peer's arena of this format. One that gives memory back, here or there, is taken out for good.

        It would be found out again by the first batch after each opening of the path, for ever.
        """
        try:
            self._agent.register(arena)
        except Lost as error:
            self._refused.add(arena.format)
            raise Refused(str(error)) from error
        try:
            return await _find(self._line, arena.format)
        except Refused:
            self._refused.add(arena.format)
            raise

    async def _write(self, here: Runs, there: Runs) -> None:
        if self._is_closed:
            raise Lost(f"the path to {self._peer} was closed here")
        write = self._agent.write(self._peer, here, there)
        try:
            await self._done(write)
        finally:
            await self._let_go(write)

    async def _done(self, write: Write) -> None:
        loop = asyncio.get_running_loop()
        started = nudged = loop.time()
        while not write.is_done:
            if self._is_closed or loop.time() - started > self._line.stall_s:
                raise Lost(f"a write to {self._peer} was not done within {self._line.stall_s:g} s")
            if loop.time() - nudged >= NUDGE_S:
                nudged = loop.time()
                await self._line.link.send(Nudge(), stall_s=self._line.stall_s)
            await asyncio.sleep(POLL_S)

    async def _let_go(self, write: Write) -> None:
        """Stop what is not done. While that cannot be, the batch's pages stay pinned by our caller: for a while."""
        for _ in range(int(self._line.stall_s / NUDGE_S)):
            if write.release():
                return
            await asyncio.sleep(NUDGE_S)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(Lost):  # NIXL has forgotten it already
                self._agent.forget(self._peer)


async def _find(line: Line, format: PageFormat | None) -> ArenaFound:
    """Raises ``Lost``, ``Refused``, ``Malformed``."""
    found = await line.ask(lambda serial: FindArena(serial=serial, format=format), ArenaFound)
    if not found.agent:
        raise Refused(f"{line.link.peer} does not let others write into that arena")
    if not (0 <= found.address < MAX_ADDRESS and 0 <= found.slot < MAX_SLOTS):
        raise Malformed(f"{line.link.peer} has no arena at {found.address:#x} with a slot {found.slot}")
    return found


def _runs(base: int, offsets: Ints, sizes: Ints) -> Runs:
    """``sizes`` bytes each, ``offsets`` bytes behind ``base``, as NIXL takes them. Raises ``Malformed``."""
    if not 0 <= base < MAX_ADDRESS:
        raise Malformed("a peer wants pages at an address that no machine has")
    runs = np.zeros((len(offsets), 3), np.uint64)
    runs[:, 0], runs[:, 1] = np.uint64(base) + offsets.astype(np.uint64), sizes
    return runs
