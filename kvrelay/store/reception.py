"""What a store offers to peers that want to carry pages to it: tickets for further links, arenas, a place for probes.

It must never let a link without a valid ticket near an arena.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from msgspec import structs

from kvrelay.channel import Channel, expect, in_time
from kvrelay.errors import Lost, Malformed, Overloaded, Refused
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.peer import ArenaFound, FindArena, Join, Meet, Met
from kvrelay.store.arena import Arena
from kvrelay.store.paths.agent import Agent
from kvrelay.store.room import Room
from kvrelay.types import PageFormat, Transport

PROBE_FORMAT = PageFormat(layers=1, kv_heads=1, head_dim=1024, dtype="float32", page_tokens=128)
"""One slot takes the largest probe: 1 MiB."""
MAX_PROBERS = 64
"""Peers that may write here by themselves, each with a slot for its tests; more use TCP."""
MAX_LINKS = 32
"""Further links of one peer."""


def probing_ground(epoch: int) -> Arena:
    """Memory for probes: slot 0 is the store's own, whence it writes, the others are lent to peers."""
    return Arena.create(PROBE_FORMAT, 1 + MAX_PROBERS, epoch)


class Visit:
    """One peer while its link of pushes lasts: its ticket, and the links that came with it."""

    def __init__(self, serve: Callable[[Channel], Awaitable[None]]) -> None:
        self.ticket = b""
        self.slot: int | None = None
        """Lent for probes."""
        self.serve = serve
        self.links: set[Channel] = set()

    def __repr__(self) -> str:
        return f"<Visit with {len(self.links)} further links>"


class Reception:
    """All visits of a store."""

    def __init__(self, room: Room, socket_path: str, probes: Arena, agent: Agent | None) -> None:
        self._room = room
        self._agent = agent
        """NIXL's, where it is installed and wanted."""
        self._socket_path = socket_path
        self._visits: dict[bytes, Visit] = {}
        self._probes = probes
        self._free = list(range(1, MAX_PROBERS + 1))

    def __repr__(self) -> str:
        return f"<Reception of {len(self._visits)} peers>"

    @property
    def transports(self) -> list[Transport]:
        """What is offered here."""
        return [Transport.TCP, Transport.SHM, *([Transport.NIXL] if self._agent else [])]

    def admit(self, visit: Visit, message: Meet) -> Met:
        """The answer to ``Meet``."""
        if not visit.ticket:
            visit.ticket = secrets.token_bytes(16)
            self._visits[visit.ticket] = visit
        if visit.slot is None and self._free:
            visit.slot = self._free.pop()
        return Met(serial=message.serial, ticket=visit.ticket, transports=self.transports, socket=self._socket_path)

    def leave(self, visit: Visit) -> None:
        """The peer is gone, and its further links with it."""
        self._visits.pop(visit.ticket, None)
        if visit.slot is not None:
            self._free.append(visit.slot)
            visit.slot = None
        for link in list(visit.links):
            link.close()

    async def serve_data(self, link: Channel) -> None:
        """A further link for payload. Raises ``Lost``, ``Malformed``."""
        async with in_time(link.peer):
            visit = self._join(link, (await expect(link, Join)).ticket)
        try:
            await visit.serve(link)
        finally:
            visit.links.discard(link)

    async def serve_map(self, link: Channel) -> None:
        """A link from this machine: arenas for whoever has a ticket. Raises ``Lost``, ``Malformed``."""
        message = await expect(link, FindArena)
        visit = self._join(link, message.ticket)
        try:
            while message.ticket == visit.ticket:
                await self._hand_out(link, visit, message)
                message = await expect(link, FindArena)
        finally:
            visit.links.discard(link)
        raise Malformed("a further link shows another ticket than before")

    async def _hand_out(self, link: Channel, visit: Visit, message: FindArena) -> None:
        try:
            found, arena = self._find(visit, message)
        except (Refused, Overloaded) as error:
            await link.send(Rejected(code=type(error).__name__, reason=str(error)))
        else:
            await link.send_fds(found, [arena.fd])

    def _join(self, link: Channel, ticket: bytes) -> Visit:
        """``link`` lasts no longer than the visit that ``ticket`` means. Raises ``Malformed``."""
        visit = self._visits.get(ticket)
        if visit is None or len(visit.links) >= MAX_LINKS:
            raise Malformed("a further link came without a valid ticket, or one of too many")
        visit.links.add(link)
        return visit

    def arena(self, visit: Visit, message: FindArena) -> ArenaFound:
        """Where an arena is, for one-sided writes from anywhere; without an agent when those are not allowed."""
        try:
            found, arena = self._find(visit, message)
            if self._agent is not None:
                self._agent.register(arena)
                return structs.replace(found, address=arena.address, agent=self._agent.metadata)
        except (Lost, Overloaded, Refused):
            pass  # the sender finds no agent in the answer, and takes another path
        return ArenaFound(serial=message.serial, format=message.format or PROBE_FORMAT)

    def _find(self, visit: Visit, message: FindArena) -> tuple[ArenaFound, Arena]:
        if message.format is not None:
            arena = self._room.shelf(message.format).arena
            return ArenaFound(serial=message.serial, format=message.format), arena
        if visit.slot is None:
            raise Overloaded("too many peers test their paths at the moment")
        return ArenaFound(serial=message.serial, format=PROBE_FORMAT, slot=visit.slot), self._probes

    def written(self, visit: Visit, size: int) -> memoryview:
        """What a peer has written into its slot for probes. Raises ``Malformed``."""
        if visit.slot is None:
            raise Malformed("a probe was written to nowhere")
        return self._probes.span(visit.slot, 0, 1)[:size]

    def nudge(self) -> None:
        """A one-sided write needs our processor for a moment."""
        if self._agent is not None:
            self._agent.pump()
