"""An operator's link to the router: workers are drained, and asked how far that is. It must never hold a worker back by
itself: what was asked for stays when the link ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvrelay.channel import Channel
from kvrelay.errors import Malformed, Refused
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.fleet.flight import Command
from kvrelay.fleet.health import examine, serves_unless_drained
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.protocol.operator import AskReady, AskRemaining, DrainWorker, HandOver, Ready


class OperatorServer:
    """Serves the links of all operators."""

    def __init__(
        self,
        brain: Brain,
        clock: Callable[[], float],
        obey: Callable[[Iterable[Command]], None],
        *,
        replicas: int = 1,
        drain: DrainCommand | None = None,
    ) -> None:
        self._brain = brain
        self._drain = drain
        self._replicas = replicas
        self._clock = clock
        self._obey = obey

    def __repr__(self) -> str:
        return f"<OperatorServer, {self._brain.drains!r}>"

    async def serve(self, channel: Channel) -> None:
        """Answer each message until the link ends. Raises ``Lost``, ``Malformed``."""
        while True:
            message = await channel.recv()
            try:
                answer: Message = self._answer(message)
            except Refused as error:
                answer = Rejected(code=type(error).__name__, reason=str(error))
            await channel.send(answer)

    def _answer(self, message: Message) -> Message:
        drains, now = self._brain.drains, self._clock()
        match message:
            case DrainWorker(undo=True):
                drains.undo(message.worker)
            case DrainWorker():
                drains.begin(message.worker, now, force=message.force)
            case HandOver():
                self._obey(drains.hand_over(message.worker, now))
            case AskRemaining():
                pass
            case AskReady():
                return self._ready(now)
            case _:
                raise Malformed(f"{type(message).__name__} is nothing that an operator asks")
        return msgspec.structs.replace(drains.remaining(message.worker, now), routers=self._replicas)

    def _ready(self, now: float) -> Ready:
        health, fleet = examine(self._brain, now, self._drain), self._brain.fleet
        members = [info.name for info in fleet.workers.usable(now)]
        members += [info.name for info in fleet.stores.usable(now)]
        draining = [
            member.info.name
            for member in fleet.workers
            if member.draining and fleet.workers.is_alive(member.info.name, now)
        ]
        return Ready(
            serving=serves_unless_drained(self._brain, now), why=health.why, members=members, draining=draining
        )
