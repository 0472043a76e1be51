"""One client's link: its requests, answered in order. What it holds ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Malformed, Overloaded, Refused
from kvrelay.protocol.client import (
    Acquire,
    Allocate,
    Announce,
    Attach,
    Attached,
    Describe,
    Exists,
    Granted,
    Milestone,
    OpenTransfer,
    Release,
    Report,
    Suspect,
)
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.store.answers import Answers
from kvrelay.store.keeper import Keeper
from kvrelay.store.peers import Peers
from kvrelay.store.shelf import Shelf

MAX_GRANT = 1 << 16
MAX_OWNER_LENGTH = 200


class Session:
    """Serves one client after its handshake."""

    def __init__(
        self,
        link: Channel,
        keeper: Keeper,
        peers: Peers,
        clock: Callable[[], float],
        watch: Callable[[Shelf], None],
    ) -> None:
        self._link = link
        self._keeper = keeper
        self._peers = peers
        self._answers = Answers(keeper, peers, clock)
        self._clock = clock
        self._watch = watch
        self._owner = ""
        self._shelf: Shelf | None = None
        self._writer = keeper.join(link.peer, clock())

    def __repr__(self) -> str:
        return f"<Session {self._owner or 'not attached'}, {self._writer!r}>"

    async def serve(self) -> None:
        """Serve until the client is gone. Raises ``Lost``, ``Malformed``."""
        try:
            while True:
                await self._handle(await self._link.recv())
        finally:
            self._keeper.leave(self._writer, self._clock())
            if self._owner:
                self._keeper.detach_owner(self._owner)

    async def _handle(self, message: Message) -> None:
        match message:
            case Announce() | OpenTransfer() | Milestone() | Release() | Suspect() | Report():
                self._take(message)
            case Attach():
                await self._attach(message)
            case Allocate() | Acquire() | Exists() | Describe():
                await self._link.send(self._answer(message))
            case _:
                raise Malformed(f"a client sent {type(message).__name__}")
        # A client that sends without end must not keep the loop from everybody else.
        await asyncio.sleep(0)

    async def _attach(self, message: Attach) -> None:
        if self._owner or not 0 < len(message.owner) <= MAX_OWNER_LENGTH:
            raise Malformed("a link is attached once, by an owner with a name")
        try:
            shelf = self._keeper.room.shelf(message.format)
        except Refused as error:
            await self._link.send(_rejected(message.id, error))
            return
        self._owner, self._shelf, self._writer.label = message.owner, shelf, message.owner
        self._keeper.attach_owner(self._owner)
        self._watch(shelf)
        attached = Attached(
            id=message.id,
            epoch=shelf.arena.epoch,
            slots=shelf.arena.slots,
            store=self._keeper.name,
            advertised=self._peers.advertised,
        )
        await self._link.send_fds(attached, [shelf.arena.fd, shelf.doorbell.fd])

    def _answer(self, message: Allocate | Acquire | Exists | Describe) -> Message:
        now = self._clock()
        try:
            match message:
                case Allocate():
                    count = min(message.count, MAX_GRANT)
                    return Granted(
                        id=message.id,
                        slots=self._keeper.catalog.grant(self._writer, self._attached(), count, now),
                    )
                case Acquire():
                    self._attached()
                    return self._keeper.acquire(self._writer, message, now)
                case Exists() | Describe():
                    return self._answers.to(message)
        except Overloaded as error:
            return _rejected(message.id, error)

    def _take(self, message: Announce | OpenTransfer | Milestone | Release | Suspect | Report) -> None:
        now = self._clock()
        match message:
            case Announce():
                self._keeper.announce(self._writer, message, self._attached().arena.format, now)
            case OpenTransfer():
                self._open(message, self._attached(), now)
            case Milestone():
                self._keeper.transfers.relay(message.transfer, message.stage, message.reason, message.tokens, now)
            case Release():
                self._keeper.leases.release(self._writer, message.lease)
            case Suspect():
                self._keeper.suspect(self._owner, self._attached(), message.slots, now)
            case Report():
                self._keeper.counts.merge(message.counts)

    def _open(self, message: OpenTransfer, shelf: Shelf, now: float) -> None:
        try:
            self._peers.open(self._writer, message, shelf, now)
        except KvrelayError as error:
            # The request goes on without a hand-off: D computes the prompt.
            self._keeper.transfers.not_opened(message.transfer, error, now)

    def _attached(self) -> Shelf:
        if self._shelf is None:
            raise Malformed("attach before anything that concerns pages")
        return self._shelf


def _rejected(id: int, error: KvrelayError) -> Rejected:
    return Rejected(id=id, code=type(error).__name__, reason=str(error))
