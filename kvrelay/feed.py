"""A member's link to every router: it registers, shows that it lives, passes events on, and never blocks its caller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Lost
from kvrelay.protocol import Heartbeat, Leaving, Message
from kvrelay.race import until_one_ends

MAX_QUEUED = 4096
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
GOODBYE_S = 0.5
"""Longest a clean end waits for a router to take the goodbye."""


class Feed:
    """Links to all ``routers``; one that is away is dialled for ever and told who we are when it is back."""

    def __init__(
        self,
        routers: Iterable[str],
        key: bytes,
        *,
        sender: str,
        registration: Message,
        heartbeat: Callable[[], Heartbeat],
        heartbeat_s: float,
    ) -> None:
        self._lines = [RouterLine(router, key, sender, registration, heartbeat, heartbeat_s) for router in routers]

    def __repr__(self) -> str:
        return f"<Feed {', '.join(map(repr, self._lines)) or 'to no router'}>"

    @property
    def dropped(self) -> int:
        """Messages that no router will see: their queue was full."""
        return sum(line.dropped for line in self._lines)

    async def run(self) -> None:
        """Feed until cancelled; then say goodbye. A member that no router knows of runs on as well."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait())
            for line in self._lines:
                tasks.create_task(line.run())

    def register(self, registration: Message) -> None:
        """What we are has changed: tell every router, and those that are dialled later."""
        for line in self._lines:
            line.register(registration)

    def post(self, message: Message) -> None:
        """Queue ``message`` for every router; the oldest goes when a queue is full."""
        for line in self._lines:
            line.post(message)


class RouterLine:
    """The feed to one router."""

    def __init__(
        self,
        router: str,
        key: bytes,
        sender: str,
        registration: Message,
        heartbeat: Callable[[], Heartbeat],
        heartbeat_s: float,
    ) -> None:
        self._router = router
        self._key = key
        self._sender = sender
        self._registration = registration
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._queue: deque[Message] = deque(maxlen=MAX_QUEUED)
        self._posted = asyncio.Event()
        self.dropped = 0
        self.is_up = False

    def __repr__(self) -> str:
        state = "up" if self.is_up else "down"
        return f"{self._router} {state}, {len(self._queue)} queued, {self.dropped} dropped"

    def register(self, registration: Message) -> None:
        self._registration = registration
        self.post(registration)

    def post(self, message: Message) -> None:
        self.dropped += len(self._queue) == MAX_QUEUED
        self._queue.append(message)
        self._posted.set()

    async def run(self) -> None:
        """Keep the link until cancelled."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                link = await channel.connect(self._router, self._key, sender=self._sender, purpose="feed")
                retry_s = FIRST_RETRY_S
                await self._serve(link)
            except KvrelayError:
                self.is_up = False
            await asyncio.sleep(retry_s)
            retry_s = min(LAST_RETRY_S, 2 * retry_s)

    async def _serve(self, link: Channel) -> None:
        try:
            await link.send(self._registration)
            self.is_up = True
            await until_one_ends(self._send(link), _watch(link))
        except asyncio.CancelledError:
            await self._leave(link)
            raise
        finally:
            self.is_up = False
            link.close()

    async def _send(self, link: Channel) -> None:
        loop = asyncio.get_running_loop()
        beat_at = loop.time()
        while True:
            if loop.time() >= beat_at:  # also between the messages of a long queue
                await link.send(self._heartbeat(), stall_s=self._stall_s)
                beat_at = loop.time() + self._heartbeat_s
            elif self._queue:
                await self._send_next(link)
            else:
                await self._wait_until(beat_at - loop.time())

    async def _send_next(self, link: Channel) -> None:
        """Send the oldest message; one that was cut off goes first on the next link, if it still has room."""
        message = self._queue.popleft()
        try:
            await link.send(message, stall_s=self._stall_s)
        except BaseException:
            if len(self._queue) < MAX_QUEUED:
                self._queue.appendleft(message)
            else:
                self.dropped += 1
            raise

    @property
    def _stall_s(self) -> float:
        return 4 * self._heartbeat_s

    async def _wait_until(self, timeout_s: float) -> None:
        self._posted.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._posted.wait()
        except TimeoutError:
            pass  # time for a heartbeat

    async def _leave(self, link: Channel) -> None:
        us = self._heartbeat()
        try:
            async with asyncio.timeout(GOODBYE_S):
                await link.send(Leaving(name=us.name, incarnation=us.incarnation))
        except (Lost, TimeoutError):
            pass  # it will miss our heartbeats instead


async def _watch(link: Channel) -> None:
    """Notice the end of a link on which the router says nothing."""
    while True:
        await link.recv()
