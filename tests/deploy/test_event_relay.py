"""The relay against a publisher that speaks as vLLM does, and loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from kvrelay.deploy import event_relay
from kvrelay.deploy.engine_pages import AllBlocksCleared, BlockStored, EnginePages, KvEvent
from kvrelay.deploy.event_relay import EventRelay, publish
from kvrelay.deploy.scratch import scratch
from kvrelay.fleet.page_log import PageLog
from kvrelay.types import Medium
from tests.fleet.values import engine
from tests.patience import until

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Publishes batches and tells again those that it kept."""

    def __init__(self, folder: Path) -> None:
        settings = msgspec.json.decode(publish(folder))
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(settings["endpoint"])
        self._asked = self._context.socket(zmq.ROUTER)
        self._asked.bind(settings["replay_endpoint"])
        self.kept: dict[int, bytes] = {}
        self._task = asyncio.create_task(self._tell_again())

    async def publish(
        self, number: int, *events: KvEvent, lose: bool = False, payload: bytes = b"", at_s: float | None = None
    ) -> None:
        body = payload or msgspec.msgpack.encode([number + 1.0 if at_s is None else at_s, list(events), 0])
        self.kept[number] = body
        if not lose:
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), body])

    async def _tell_again(self) -> None:
        while True:
            who, _, start = await self._asked.recv_multipart()
            for number, body in sorted(self.kept.items()):
                if number >= int.from_bytes(start, "big"):
                    await self._asked.send_multipart([who, b"", b"", number.to_bytes(8, "big"), body])
            await self._asked.send_multipart([who, b"", b"", END, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


class Heard:
    """A publisher, and a relay that listens to it."""

    def __init__(self, folder: Path) -> None:
        self.publisher = Publisher(folder)
        self.log = PageLog("i1")
        self.relay = EventRelay(folder, EnginePages(self.log, engine))
        self.task: asyncio.Task[None] | None = None

    async def listen(self, first: int = 0) -> None:
        """Start the relay, and return when it hears what is published."""
        self.task = asyncio.create_task(self.relay.run())
        while self.relay._next <= first:
            await self.publisher.publish(first, at_s=0.5)  # lost as long as nobody has subscribed
            await asyncio.sleep(0.02)

    @property
    def pages(self) -> int:
        return sum(map(len, self.log._held.values()))


@pytest_asyncio.fixture
async def heard() -> AsyncIterator[Heard]:
    with scratch("relay-", "/tmp") as folder:
        heard = Heard(folder)
        yield heard
        if heard.task is not None:
            heard.task.cancel()
            await asyncio.gather(heard.task, return_exceptions=True)
        await heard.publisher.close()


def stored(number: int) -> BlockStored:
    """A block of four pages of its own."""
    return BlockStored([number], None, [number] * 16, 16, medium="GPU", group_idx=0)


async def test_batches_become_pages(heard: Heard) -> None:
    await heard.listen()
    await heard.publisher.publish(1, stored(1), stored(2))
    await heard.publisher.publish(2, stored(3))
    await until(lambda: heard.pages == 12)
    assert heard.relay.counts() == {"event_replays": 0, "event_losses": 0, "blocks_unnamed": 0, "block_overflows": 0}


async def test_what_was_published_before_it_listened_is_asked_for(heard: Heard) -> None:
    for number in range(3):
        await heard.publisher.publish(number, stored(number))
    await heard.listen(first=3)
    assert heard.pages == 12
    assert heard.relay.losses == 0


async def test_a_lost_batch_is_noticed_with_the_next_one_and_told_again_in_order(heard: Heard) -> None:
    await heard.listen()
    await heard.publisher.publish(1, stored(1), AllBlocksCleared(), lose=True)
    await heard.publisher.publish(2, stored(2), lose=True)
    await heard.publisher.publish(3, stored(3))
    await until(lambda: heard.pages == 8)
    assert (heard.relay.replays, heard.relay.losses) == (1, 0)


async def test_what_is_kept_no_more_costs_the_engine_its_pages(heard: Heard) -> None:
    await heard.listen()
    await heard.publisher.publish(1, stored(1))
    await until(lambda: heard.pages == 4)
    heard.publisher.kept.clear()
    await heard.publisher.publish(5, stored(5))
    await until(lambda: heard.relay.losses == 1 and heard.pages == 4)
    await heard.publisher.publish(6, stored(6))
    await until(lambda: heard.pages == 8)


@pytest.mark.parametrize("at_s", [10.0, 0.25], ids=["later", "clock set back"])
async def test_numbers_that_go_backwards_are_heard_once_unless_the_engine_began_anew(heard: Heard, at_s: float) -> None:
    await heard.listen()
    cleared = AllBlocksCleared()  # whoever heard it twice would lack what came in between
    await heard.publisher.publish(1, cleared, stored(1))
    await heard.publisher.publish(2, stored(2))
    await heard.publisher.publish(1, cleared, stored(1))
    await heard.publisher.publish(3, stored(3))
    await until(lambda: heard.pages == 12)
    heard.publisher.kept.clear()
    await heard.publisher.publish(0, cleared, stored(9), at_s=at_s)
    await until(lambda: heard.pages == 4)
    assert heard.relay.losses == 1
    await heard.publisher.publish(1, stored(1))
    await heard.publisher.publish(0, cleared, stored(9), at_s=at_s)
    await heard.publisher.publish(2, stored(2))
    await until(lambda: heard.pages == 12)
    assert heard.relay.losses == 1


async def test_of_what_was_heard_no_more_is_remembered_than_may_come_twice(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_relay, "MAX_REMEMBERED", 2)
    for number in range(5):
        await heard.publisher.publish(number, stored(number))
    await heard.listen(first=5)
    assert list(heard.relay._heard) == [4, 5]


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "Unheard"}], 0])])
async def test_a_batch_that_cannot_be_read_counts_as_lost(heard: Heard, payload: bytes) -> None:
    await heard.listen()
    await heard.publisher.publish(1, stored(1))
    await heard.publisher.publish(2, payload=payload)
    await until(lambda: heard.relay.losses == 1)
    await heard.publisher.publish(3, stored(3))
    await until(lambda: heard.pages == 4)


async def test_an_engine_that_answers_no_question_is_listened_to_all_the_same(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_relay, "REPLAY_WAIT_S", 0.05)
    heard.publisher._task.cancel()
    await heard.listen()
    await heard.publisher.publish(1, stored(1))
    await until(lambda: heard.pages == 4)


@pytest.mark.vllm
async def test_what_vllms_own_publisher_says_is_understood() -> None:
    from vllm.distributed import kv_events

    with scratch("relay-", "/tmp") as folder:
        settings = msgspec.json.decode(publish(folder))
        own = kv_events.ZmqEventPublisher(0, settings["endpoint"], settings["replay_endpoint"])
        log = PageLog("i1")
        relay = EventRelay(folder, EnginePages(log, engine))
        stored = kv_events.BlockStored(
            block_hashes=[7],
            parent_block_hash=None,
            token_ids=[1] * 16,
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None],
            group_idx=0,
            session_id="s",
        )
        own.publish(kv_events.KVEventBatch(ts=1.0, events=[stored]))
        removed = kv_events.BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0)
        own.publish(kv_events.KVEventBatch(ts=2.0, events=[removed, stored]))
        task = asyncio.create_task(relay.run())
        await until(lambda: relay._next >= 2)
        assert sum(map(len, log._held.values())) == 4
        own.publish(kv_events.KVEventBatch(ts=3.0, events=[kv_events.AllBlocksCleared()]))
        await until(lambda: not log._held[Medium.HBM])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(own.shutdown)
        assert (relay.losses, relay.counts()["blocks_unnamed"]) == (0, 0)
