"""The feed: registration, heartbeats and events reach every router, whenever it comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from kvrelay import feed as feed_module
from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.errors import Lost
from kvrelay.feed import Feed, RouterLine
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import (
    Heartbeat,
    Leaving,
    PageEvents,
    PageSnapshot,
    PagesWanted,
    RegisterStore,
    TransferEvent,
)
from kvrelay.protocol.frame import MAX_FRAME_BYTES
from kvrelay.protocol.handshake import Rejected
from kvrelay.protocol.message import Message
from kvrelay.types import Medium, Stage, StoreInfo
from tests.fleet.values import names
from tests.held_port import held_port
from tests.patience import PATIENCE_S, until
from tests.sockets import sockets_to

KEY = b"k" * 32
US = RegisterStore(store=StoreInfo(name="s", incarnation="1", address="127.0.0.1:1", capacity_bytes=1))


def event(number: int) -> TransferEvent:
    return TransferEvent(store="s", transfer=f"t{number}", stage=Stage.STARTED)


class Router:
    """A router's end: it writes down what it hears."""

    def __init__(self, port: int = 0, pause_s: float = 0.0) -> None:
        sock = bind_tcp("127.0.0.1", port)
        self.port: int = sock.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.heard: list[Message] = []
        self.links: list[Channel] = []
        self._pause_s = pause_s
        listener = Listener(sock, KEY, receiver="router", purposes={"feed"}, serve=self._serve)
        self._task = asyncio.create_task(listener.run())

    async def _serve(self, link: Channel) -> None:
        self.links.append(link)
        while True:
            self.heard.append(await link.recv())
            await asyncio.sleep(self._pause_s)

    @property
    def events(self) -> list[str]:
        return [message.transfer for message in self.heard if isinstance(message, TransferEvent)]

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    def removed(self) -> int:
        """Pages that it heard are gone."""
        events = [message for message in self.heard if isinstance(message, PageEvents)]
        return sum(len(change.removed) for event in events for change in event.changes)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextlib.asynccontextmanager
async def feeding(*routers: str, pages: PageLog | None = None, heartbeat_s: float = 0.1) -> AsyncIterator[Feed]:
    feed = Feed(
        routers,
        KEY,
        sender="s",
        registration=US,
        heartbeat=lambda: Heartbeat(name="s", incarnation="1", healthy=True),
        heartbeat_s=heartbeat_s,
        pages=pages,
    )
    task = asyncio.create_task(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_router_hears_the_registration_first_then_heartbeats_and_events_in_order() -> None:
    router = Router()
    async with feeding(router.address) as feed:
        for number in range(50):
            feed.post(event(number))
        await until(lambda: router.count(Heartbeat) >= 3 and len(router.events) == 50)
    assert router.heard[0] == US
    assert router.count(RegisterStore) == 1
    assert router.events == [f"t{number}" for number in range(50)]
    await router.close()


async def test_events_are_passed_on_at_once_not_with_the_next_heartbeat() -> None:
    router = Router()
    async with feeding(router.address, heartbeat_s=60.0) as feed:
        await until(lambda: router.count(Heartbeat) == 1)
        feed.post(event(1))
        await until(lambda: router.events)
        assert router.count(Heartbeat) == 1
    await router.close()


async def test_a_feed_without_routers_runs_until_it_is_cancelled() -> None:
    feed = Feed((), KEY, sender="s", registration=US, heartbeat=lambda: pytest.fail("to nobody"), heartbeat_s=0.1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(feed.run(), 0.1)


async def test_a_changed_member_tells_routers_at_once_and_those_that_come_later() -> None:
    router = Router()
    changed = RegisterStore(store=StoreInfo(name="s", incarnation="1", address="127.0.0.1:2", capacity_bytes=1))
    with held_port() as port:
        async with feeding(router.address, f"127.0.0.1:{port}") as feed:
            await until(lambda: router.count(Heartbeat) >= 1)
            feed.register(changed)
            await until(lambda: router.heard.count(changed) == 1)
            late = Router(port)
            await until(lambda: late.count(Heartbeat) >= 1)
            assert late.heard[0] == changed
    await router.close()
    await late.close()


async def test_a_restarted_router_hears_the_registration_again_and_what_was_queued_meanwhile() -> None:
    with held_port() as port:
        router = Router(port)
        async with feeding(router.address) as feed:
            await until(lambda: " up, " in repr(feed))
            await router.close()
            await until(lambda: " down, " in repr(feed))
            feed.post(event(7))
            again = Router(port)
            await until(lambda: again.events == ["t7"])
            assert again.heard[0] == US
            await again.close()


async def test_a_router_that_is_away_does_not_hold_the_others_up() -> None:
    router = Router()
    with held_port() as away:
        async with feeding(f"127.0.0.1:{away}", router.address) as feed:
            feed.post(event(1))
            await until(lambda: router.events == ["t1"])
            assert "down, 1 queued" in repr(feed)
            assert "up, 0 queued" in repr(feed)
    await router.close()


async def test_a_full_queue_drops_the_oldest_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_QUEUED", 3)
    feed = Feed(
        ["127.0.0.1:1"],
        KEY,
        sender="s",
        registration=US,
        heartbeat=lambda: Heartbeat(name="s", incarnation="1", healthy=True),
        heartbeat_s=0.1,
    )
    for number in range(5):
        feed.post(event(number))
    assert feed.dropped == 2


def long_event(number: int) -> TransferEvent:
    """Longer than what a socket takes from a sender whose peer does not read."""
    return TransferEvent(store="s", transfer=f"t{number}", stage=Stage.FAILED, reason="x" * (3 << 20))


class HeldLink:
    """A link whose every ``send`` takes until ``go``, or breaks then."""

    def __init__(self) -> None:
        self.go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent: list[Message] = []

    async def send(self, message: Message, *, stall_s: float) -> None:
        await self.go
        self.sent.append(message)


@contextlib.asynccontextmanager
async def held_line(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RouterLine, HeldLink]]:
    """A line with room for three, in the middle of sending its first heartbeat."""
    monkeypatch.setattr(feed_module, "MAX_QUEUED", 3)
    beat = Heartbeat(name="s", incarnation="1", healthy=True)
    line, link = RouterLine("r", KEY, "s", US, lambda: beat, 60.0), HeldLink()
    task = asyncio.create_task(line._send(link))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    link.go.set_result(None)
    await until(lambda: link.sent)
    link.go = asyncio.get_running_loop().create_future()
    yield line, link
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_event_that_is_being_sent_takes_no_room_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held_line(monkeypatch) as (line, link):
        line.post(event(0))
        await until(lambda: not line._queue)
        for number in range(1, 4):
            line.post(event(number))
        link.go.set_result(None)
        await until(lambda: len(link.sent) == 5)
        assert link.sent[1:] == [event(number) for number in range(4)]
        assert line.dropped == 0


@pytest.mark.parametrize(("posted", "kept"), [(2, (0, 1)), (4, (1, 2, 3))])
async def test_an_event_that_a_broken_link_cut_off_is_kept_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch, posted: int, kept: tuple[int, ...]
) -> None:
    async with held_line(monkeypatch) as (line, link):
        line.post(event(0))
        await until(lambda: not line._queue)
        for number in range(1, posted):
            line.post(event(number))
        link.go.set_exception(Lost("it broke"))
        await until(lambda: (len(line._queue), line.dropped) == (len(kept), posted - len(kept)))
        again = HeldLink()
        again.go.set_result(None)
        task = asyncio.create_task(line._send(again))  # type: ignore[arg-type]
        await until(lambda: len(again.sent) > len(kept))
        task.cancel()
        assert again.sent[1:] == [event(number) for number in kept]
        assert line.dropped == posted - len(kept)


async def test_an_event_too_long_for_a_message_is_dropped_and_those_after_it_are_sent() -> None:
    router = Router()
    async with feeding(router.address) as feed:
        feed.post(TransferEvent(store="s", transfer="t0", stage=Stage.FAILED, reason="x" * MAX_FRAME_BYTES))
        feed.post(event(1))
        await until(lambda: router.events)
        assert feed.dropped == 1
    assert router.events == ["t1"]
    assert router.count(RegisterStore) == 1
    await router.close()


async def test_a_long_queue_does_not_hold_the_heartbeats_up() -> None:
    router = Router(pause_s=0.05)
    async with feeding(router.address) as feed:
        for number in range(12):
            feed.post(long_event(number))
        await until(lambda: len(router.events) == 12)
        beats = [type(message) for message in router.heard[:12]].count(Heartbeat)
        assert beats >= 3, "one a tenth of a second"
    await router.close()


async def test_a_clean_end_says_goodbye() -> None:
    router = Router()
    async with feeding(router.address):
        await until(lambda: router.count(Heartbeat) >= 1)
    await until(lambda: router.heard[-1] == Leaving(name="s", incarnation="1"))
    await router.close()


async def test_a_router_that_stops_reading_is_left_and_dialled_again() -> None:
    router = Router()
    async with feeding(router.address) as feed:
        await until(lambda: router.count(Heartbeat) >= 1)
        router.links[0].close()
        await until(lambda: len(router.links) == 2 and " up, " in repr(feed))
        await until(lambda: router.count(RegisterStore) == 2)
    await router.close()


async def test_without_routers_the_feed_just_waits() -> None:
    async with feeding() as feed:
        feed.post(event(1))
        await asyncio.sleep(0.01)
        assert repr(feed) == "<Feed to no router>"


async def test_a_router_that_asks_is_told_of_all_pages_and_then_of_changes_many_at_once() -> None:
    router, log = Router(), PageLog("1")
    log.store(names(*range(100)), Medium.MEMORY)
    async with feeding(router.address, pages=log):
        await until(lambda: router.links)
        await asyncio.sleep(0.05)
        assert router.count(PageSnapshot) == 0, "nobody asked"
        await router.links[0].send(PagesWanted(after=-1))
        await until(lambda: router.count(PageSnapshot) == 1)
        began = time.monotonic()
        for number in range(100):
            log.remove(names(number), Medium.MEMORY)
            await asyncio.sleep(0)
        await until(lambda: router.removed() == 100)
        most = 2 + (time.monotonic() - began) / feed_module.PAGES_EVERY_S
        assert router.count(PageEvents) <= min(most, 50)
        before = router.count(PageEvents)
        await router.links[0].send(PagesWanted(after=0))
        await until(lambda: router.count(PageEvents) == 2 * before)
    await router.close()


async def test_a_router_that_refuses_is_dialled_less_and_less_often_and_one_that_speaks_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay_s: float) -> None:
        if delay_s:
            pauses.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", counted)
    answer: Message = Rejected(code="Refused", reason="s is registered and lives")

    async def serve(link: Channel) -> None:
        await link.recv()
        await link.send(answer)
        await sleep(0.05)  # the link ends when this returns

    sock = bind_tcp("127.0.0.1", 0)
    serving = asyncio.create_task(Listener(sock, KEY, receiver="router", purposes={"feed"}, serve=serve).run())
    async with feeding(f"127.0.0.1:{sock.getsockname()[1]}"):
        await until_paused(pauses, 6)
        assert pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
        answer = PagesWanted(after=-1)
        pauses.clear()
        await until_paused(pauses, 3)
        assert pauses[-2:] == [0.05, 0.05]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def until_paused(pauses: list[float], count: int) -> None:
    """The feed dialled again so often."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        while len(pauses) < count:
            soon = loop.create_future()
            loop.call_later(0.01, soon.set_result, None)
            await soon


async def test_a_link_to_a_router_ends_when_its_machine_acknowledges_nothing() -> None:
    router = Router()
    async with feeding(router.address, heartbeat_s=0.5):
        await until(lambda: router.links)
        limits_ms = {sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in sockets_to(router.port)}
        assert limits_ms == {2000}
    await router.close()
