"""What the router has to say to its members: a line for each that has a link here. It must never keep what a member
that is away does not hear."""

from __future__ import annotations

import asyncio

from kvrelay.channel import Channel
from kvrelay.protocol.message import Message

MAX_QUEUED = 1024
SAY_STALL_S = 2.0
"""A member that does not even take a message loses its link."""


class Line:
    """Messages to one member over one link."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Message] = asyncio.Queue(MAX_QUEUED)

    def __repr__(self) -> str:
        return f"<Line with {self._queue.qsize()} messages>"

    def say(self, message: Message) -> bool:
        """False when too many messages wait already."""
        if self._queue.full():
            return False
        self._queue.put_nowait(message)
        return True

    async def run(self, channel: Channel) -> None:
        """Send until cancelled. Raises ``Lost``, ``Malformed`` on a message that is too long."""
        while True:
            await channel.send(await self._queue.get(), stall_s=SAY_STALL_S)


class Switchboard:
    """Lines by member; of a member with several links the last one is used."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self.unheard = 0
        """Messages to members that have no link, or that do not read."""

    def __repr__(self) -> str:
        return f"<Switchboard {len(self._lines)} lines, {self.unheard} unheard>"

    def open(self, member: str) -> Line:
        """A line to ``member``; to be closed with its link."""
        line = self._lines[member] = Line()
        return line

    def close(self, member: str, line: Line) -> None:
        if self._lines.get(member) is line:
            del self._lines[member]

    def say(self, member: str, message: Message) -> bool:
        """Whether ``message`` is on its way."""
        line = self._lines.get(member)
        heard = line is not None and line.say(message)
        self.unheard += not heard
        return heard
