"""The feed: registration, heartbeats and events reach every router, whenever it comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from kvrelay import feed as feed_module
from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.feed import Feed
from kvrelay.protocol import Heartbeat, Leaving, Message, RegisterStore, TransferEvent
from kvrelay.types import Stage, StoreInfo

KEY = b"k" * 32
US = RegisterStore(store=StoreInfo(name="s", incarnation="1", address="127.0.0.1:1", capacity_bytes=1))


def event(number: int) -> TransferEvent:
    return TransferEvent(store="s", transfer=f"t{number}", stage=Stage.STARTED)


async def eventually(check: Callable[[], object], within_s: float = 4.0) -> None:
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


class Router:
    """A router's end: it writes down what it hears."""

    def __init__(self, port: int = 0) -> None:
        sock = bind_tcp("127.0.0.1", port)
        self.port: int = sock.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.heard: list[Message] = []
        self.links: list[Channel] = []
        listener = Listener(sock, KEY, receiver="router", purposes={"feed"}, serve=self._serve)
        self._task = asyncio.create_task(listener.run())

    async def _serve(self, link: Channel) -> None:
        self.links.append(link)
        while True:
            self.heard.append(await link.recv())

    @property
    def events(self) -> list[str]:
        return [message.transfer for message in self.heard if isinstance(message, TransferEvent)]

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextlib.asynccontextmanager
async def feeding(*routers: str) -> AsyncIterator[Feed]:
    feed = Feed(
        routers,
        KEY,
        sender="s",
        registration=US,
        heartbeat=lambda: Heartbeat(name="s", incarnation="1", healthy=True),
        heartbeat_s=0.1,
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
        await eventually(lambda: router.count(Heartbeat) >= 3 and len(router.events) == 50)
    assert router.heard[0] == US
    assert router.count(RegisterStore) == 1
    assert router.events == [f"t{number}" for number in range(50)]
    await router.close()


async def test_events_are_passed_on_at_once_not_with_the_next_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    async with feeding(router.address) as feed:
        await eventually(lambda: router.count(Heartbeat) >= 1)
        started = time.monotonic()
        feed.post(event(1))
        await eventually(lambda: router.events)
        assert time.monotonic() - started < 0.08
    await router.close()


async def test_a_restarted_router_hears_the_registration_again_and_what_was_queued_meanwhile() -> None:
    router = Router()
    async with feeding(router.address) as feed:
        await eventually(lambda: feed.connected == 1)
        await router.close()
        await eventually(lambda: feed.connected == 0)
        feed.post(event(7))
        again = Router(router.port)
        await eventually(lambda: again.events == ["t7"])
        assert again.heard[0] == US
        await again.close()


async def test_a_router_that_is_away_does_not_hold_the_others_up() -> None:
    with bind_tcp("127.0.0.1", 0) as unused:
        away = f"127.0.0.1:{unused.getsockname()[1]}"
    router = Router()
    async with feeding(away, router.address) as feed:
        feed.post(event(1))
        await eventually(lambda: router.events == ["t1"])
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


async def test_a_clean_end_says_goodbye() -> None:
    router = Router()
    async with feeding(router.address):
        await eventually(lambda: router.count(Heartbeat) >= 1)
    await eventually(lambda: router.heard[-1] == Leaving(name="s", incarnation="1"))
    await router.close()


async def test_a_router_that_stops_reading_is_left_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    async with feeding(router.address) as feed:
        await eventually(lambda: router.count(Heartbeat) >= 1)
        router.links[0].close()
        await eventually(lambda: len(router.links) == 2 and feed.connected == 1)
        assert router.count(RegisterStore) == 2
    await router.close()


async def test_without_routers_the_feed_just_waits() -> None:
    async with feeding() as feed:
        feed.post(event(1))
        await asyncio.sleep(0.01)
        assert repr(feed) == "<Feed to no router>"
