"""A member's link to every router: it registers, shows that it lives, passes events on, and never blocks its caller."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvrelay import channel
from kvrelay.channel import Channel
from kvrelay.errors import KvrelayError, Lost, Malformed, Refused, answered
from kvrelay.protocol.feed import Heartbeat, Leaving, PageEvents, PageSnapshot, PagesWanted
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.race import until_one_ends

_log = logging.getLogger(__name__)

MAX_QUEUED = 4096
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
PAGES_EVERY_S = 0.01
"""Changes of pages wait so long for others, so that many pages share a message."""
GOODBYE_S = 0.5
"""Longest a clean end waits for a router to take the goodbye."""


class Pages(Protocol):
    """What a member tells of its pages; ``fleet.page_log`` has the one that keeps its word."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever there is something new to read."""

    def follow(self, after: int) -> Iterator[PageEvents | PageSnapshot | None]:
        """What a router needs that knows everything up to change ``after``; None: nothing is new."""


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
        pages: Pages | None = None,
        heard: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._lines = [
            RouterLine(router, key, sender, registration, heartbeat, heartbeat_s, pages, heard) for router in routers
        ]

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

    def silence(self) -> None:
        """The end will be that of a process that is killed: no goodbye."""
        for line in self._lines:
            line.says_goodbye = False

    def mute(self, on: bool) -> None:
        """Send nothing and close nothing while it is on, as behind a network that is cut."""
        for line in self._lines:
            (line.may_speak.clear if on else line.may_speak.set)()

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
        pages: Pages | None = None,
        heard: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._heard = heard
        self._router = router
        self._key = key
        self._sender = sender
        self._registration = registration
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._queue: deque[Message] = deque(maxlen=MAX_QUEUED)
        self._posted = asyncio.Event()
        self._log = pages
        self._pages: Iterator[PageEvents | PageSnapshot | None] = iter(())
        """What the router has still to hear of the pages here; nothing before it asked."""
        self._pages_at = 0.0
        """When their changes are told next."""
        if pages is not None:
            pages.watch(self._posted.set)
        self._refusal = ""
        """Why the router would not have us, the last time."""
        self._retry_s = FIRST_RETRY_S
        """Pause before the next dial; that of the first one after a router that spoke to us."""
        self.dropped = 0
        self.is_up = False
        self.says_goodbye = True
        self.may_speak = asyncio.Event()
        self.may_speak.set()

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
        while True:
            await self.may_speak.wait()
            try:
                await self._serve(await channel.connect(self._router, self._key, sender=self._sender, purpose="feed"))
            except Refused as error:
                self._tell_refusal(str(error))
            except KvrelayError:
                pass
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(LAST_RETRY_S, 2 * self._retry_s)

    def _tell_refusal(self, why: str) -> None:
        """Once: it goes on dialling, since what is in its way may be a former life of its own."""
        if why != self._refusal:
            _log.error("%s is refused by the router at %s, and gets no work there: %s", self._sender, self._router, why)
        self._refusal = why

    async def _serve(self, link: Channel) -> None:
        try:
            link.give_up_after(self._stall_s)
            await link.send(self._registration)
            self.is_up = True
            await until_one_ends(self._send(link), self._listen(link))
        except asyncio.CancelledError:
            if self.says_goodbye:
                await self._leave(link)
            raise
        finally:
            self.is_up = False
            self._pages = iter(())
            link.close()

    async def _send(self, link: Channel) -> None:
        loop = asyncio.get_running_loop()
        beat_at = loop.time()
        while True:
            await self.may_speak.wait()
            if loop.time() >= beat_at:  # also between the messages of a long queue
                await link.send(self._heartbeat(), stall_s=self._stall_s)
                beat_at = loop.time() + self._heartbeat_s
            elif self._queue:
                await self._send_next(link)
            elif (pages := self._next_pages(loop.time())) is not None:
                await link.send(pages, stall_s=self._stall_s)
                await asyncio.sleep(0)  # of a snapshot there are many more
            else:
                await self._wait(beat_at, loop.time())

    async def _send_next(self, link: Channel) -> None:
        """Send the oldest message; one that was cut off goes first on the next link, if it still has room."""
        message = self._queue.popleft()
        try:
            await link.send(message, stall_s=self._stall_s)
        except Malformed:
            self.dropped += 1  # too long for a frame, on the next link as on this one
        except BaseException:
            if len(self._queue) < MAX_QUEUED:
                self._queue.appendleft(message)
            else:
                self.dropped += 1
            raise

    @property
    def _stall_s(self) -> float:
        return 4 * self._heartbeat_s

    def _next_pages(self, now: float) -> PageEvents | PageSnapshot | None:
        if now < self._pages_at:
            return None
        pages = next(self._pages, None)
        if isinstance(pages, PageEvents):
            self._pages_at = now + PAGES_EVERY_S
        return pages

    async def _wait(self, beat_at: float, now: float) -> None:
        """Until something is posted or due. Called when there is nothing to send."""
        self._posted.clear()
        until = min(beat_at, self._pages_at) if now < self._pages_at else beat_at
        try:
            async with asyncio.timeout(until - now):
                await self._posted.wait()
        except TimeoutError:
            pass  # time for a heartbeat, or for the pages

    async def _listen(self, link: Channel) -> None:
        """Hear what the router asks for, and notice the end of the link."""
        while True:
            message = await link.recv()
            if isinstance(message, Rejected):
                raise answered(message.code, message.reason)
            self._retry_s = FIRST_RETRY_S
            if isinstance(message, PagesWanted) and self._log is not None:
                self._pages = self._log.follow(message.after)
                self._posted.set()
            else:
                self._heard(message)

    async def _leave(self, link: Channel) -> None:
        us = self._heartbeat()
        try:
            async with asyncio.timeout(GOODBYE_S):
                await link.send(Leaving(name=us.name, incarnation=us.incarnation))
        except (Lost, TimeoutError):
            pass  # it will miss our heartbeats instead
