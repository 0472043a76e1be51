"""The control port: workers and stores register, send heartbeats and milestones. It must never take a message from a
link that did not register first, nor one that speaks for another member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from kvrelay.channel import Channel
from kvrelay.errors import Malformed, Refused
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Command
from kvrelay.protocol.feed import (
    Heartbeat,
    Leaving,
    Neighbours,
    PageEvents,
    PageSnapshot,
    PagesWanted,
    RegisterStore,
    RegisterWorker,
    SetDrain,
    TransferEvent,
)
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends
from kvrelay.router.switchboard import Switchboard
from kvrelay.types import StoreInfo, WorkerInfo

Member = WorkerInfo | StoreInfo

ASK_STALL_S = 2.0
"""A member that does not even take a question loses its link."""

_SHORT_IN_TURN = 16
"""Milestones of one link that are taken before anybody else has a turn: each takes microseconds."""


class FeedServer:
    """Serves the links of all workers and stores."""

    def __init__(
        self,
        brain: Brain,
        clock: Callable[[], float],
        obey: Callable[[Iterable[Command]], None],
        heard: Callable[[WorkerInfo], None],
        switchboard: Switchboard,
    ) -> None:
        self._switchboard = switchboard
        self._brain = brain
        self._clock = clock
        self._obey = obey
        self._heard = heard
        self._links = 0

    def __repr__(self) -> str:
        return f"<FeedServer {self._links} links>"

    async def serve(self, channel: Channel) -> None:
        """One link until it ends; its loss is no death: the lease decides. Raises ``Lost``, ``Malformed``."""
        self._links += 1
        try:
            member = self._register(await channel.recv())
            self._brain.members.link(member, 1)
            line = self._switchboard.open(_number(member))
            try:
                await until_one_ends(self._listen(channel, member), line.run(channel))
            finally:
                self._switchboard.close(_number(member), line)
                self._brain.members.link(member, -1)
        except Refused as error:  # it may dial again; the brain counts it
            await channel.send(Rejected(code=type(error).__name__, reason=str(error)), stall_s=ASK_STALL_S)
        finally:
            self._links -= 1

    async def _listen(self, channel: Channel, member: Member) -> None:
        told, in_turn = list[str](), 0
        await self._ask(channel, self._brain.members.pages_wanted(member, self._clock()))
        while True:
            message = await channel.recv()
            await self._ask(channel, self._take(member, message))
            if isinstance(member, WorkerInfo):
                await self._tell_drain(channel, member)
            elif isinstance(message, Heartbeat):
                told = await self._tell(channel, member, told)
            in_turn = 0 if isinstance(message, PageEvents | PageSnapshot) else (in_turn + 1) % _SHORT_IN_TURN
            if in_turn == 0:
                await asyncio.sleep(0)  # a snapshot is many messages at once: streams go on between them

    async def _ask(self, channel: Channel, question: PagesWanted | None) -> None:
        if question is not None:
            await channel.send(question, stall_s=ASK_STALL_S)

    async def _tell_drain(self, channel: Channel, worker: WorkerInfo) -> None:
        """Tell a worker whether it drains, until it says that it knows: after each word of its own."""
        drain = self._brain.drains.untold(worker)
        if drain is not None:
            await channel.send(SetDrain(drain=drain), stall_s=ASK_STALL_S)

    async def _tell(self, channel: Channel, member: StoreInfo, told: list[str]) -> list[str]:
        """Tell a store where its peers are, if it was not told so: with each beat of its own."""
        stores = self._brain.fleet.stores.usable(self._clock())
        others = [store.address for store in stores if store.name != member.name]
        if others != told:
            await channel.send(Neighbours(addresses=others), stall_s=ASK_STALL_S)
        return others

    def _renew(self, member: Member, beat: Heartbeat) -> None:
        current = self._brain.members.heartbeat(member, beat, self._clock())
        if current and beat.healthy and isinstance(member, WorkerInfo):
            self._heard(member)

    def _register(self, message: Message) -> Member:
        match message:
            case RegisterWorker(worker=worker, drain=drain):
                _check_url(worker.url)
                self._obey(self._brain.register_worker(worker, self._clock()))
                self._brain.drains.heard(worker, drain)
                self._heard(worker)
                return worker
            case RegisterStore(store=store):
                self._brain.members.register_store(store, self._clock())
                return store
            case _:
                raise Malformed(f"{type(message).__name__} came before a registration; register first")

    def _take(self, member: Member, message: Message) -> PagesWanted | None:
        if isinstance(message, PageEvents | PageSnapshot):
            question, commands = self._brain.pages(member, message, self._clock())
            self._obey(commands)
            return question
        match message:
            case RegisterWorker(worker=worker) if _is_same(worker, member):
                self._register(message)  # it got other weights
            case Heartbeat(name=member.name):
                self._renew(member, message)
                return self._brain.members.pages_missing(member, self._clock())
            case Leaving(name=member.name):
                self._obey(self._brain.leaving(member, self._clock()))
            case TransferEvent(store=member.name):
                self._obey(self._brain.transfer_event(message, self._clock()))
            case _:
                raise Malformed(f"{type(message).__name__} is not for {member.name} to send here")
        return None


def _number(member: Member) -> str:
    """Where the switchboard reaches a store; workers, which may be called like one, are not spoken to."""
    return member.name if isinstance(member, StoreInfo) else f"{member.name}\0worker"


def _is_same(worker: WorkerInfo, member: Member) -> bool:
    return isinstance(member, WorkerInfo) and (worker.name, worker.incarnation) == (member.name, member.incarnation)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query or parts.username:
        raise Malformed(f"a worker registered with the URL {url!r}; give it as http://host:port")
