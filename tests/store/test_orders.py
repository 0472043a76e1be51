"""A router orders pushes between real stores: what is here goes there, and the end is told, even if nothing is here."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrelay.protocol.feed import Heartbeat, PushOrder
from kvrelay.store.client import StoreClient
from kvrelay.types import Stage
from tests.patience import until_on_thread
from tests.store.conftest import FORMAT, StoreProcess, page_name, payload
from tests.store.test_events import Ear, listening

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]
COUNT = 6


def order(push_to: str, transfer: str = "r/0/0/pull/1", count: int = COUNT, **more: Any) -> PushOrder:
    names = [page_name(number) for number in range(count)]
    made = PushOrder(transfer=transfer, names=names, total_tokens=8 * count, format=FORMAT, push_to=push_to)
    return msgspec.structs.replace(made, **more)


class Stores:
    """Two stores that one router hears, and a client at each; the first has pages."""

    def __init__(self, ear: Ear, start: Start, connect: Connect, toml: str = "") -> None:
        self._ear = ear
        self.source, self.target = (start(name, 64, toml, (ear.address,)) for name in ("source", "target"))
        self.writer, self.reader = connect(self.source, "a/1", grant_slots=16), connect(self.target, "b/1")

    def put(self, count: int) -> None:
        for number in range(count):
            self.writer.put(page_name(number), payload(number), 8)

    async def tell(self, store: str, message: PushOrder) -> None:
        """What a router would say to ``store``, over its link."""
        await self._ear.channel(store).send(message)

    async def linked(self) -> None:
        await until_on_thread(
            lambda: {each.name for each in self._ear.heard if isinstance(each, Heartbeat)} == {"source", "target"}
        )


async def test_pages_that_are_here_go_where_the_router_wants_them(start_store: Start, connect: Connect) -> None:
    async with listening() as ear:
        stores = await asyncio.to_thread(Stores, ear, start_store, connect)
        await asyncio.to_thread(stores.put, COUNT)
        await stores.linked()
        await stores.tell("source", order(stores.target.address))
        await until_on_thread(lambda: ("target", Stage.ARRIVED) in ear.stages("r/0/0/pull/1"))
        assert ear.event("r/0/0/pull/1", Stage.ARRIVED).bytes == COUNT * FORMAT.page_bytes
        for number in range(COUNT):
            assert await asyncio.to_thread(stores.reader.get, page_name(number)) == payload(number)
        # Again: nothing travels, and the router hears that all is there.
        await stores.tell("source", order(stores.target.address, "again"))
        await until_on_thread(lambda: ("target", Stage.ARRIVED) in ear.stages("again"))
        assert ear.event("again", Stage.ARRIVED).bytes == 0
        assert (await asyncio.to_thread(stores.writer.describe))["push_orders"] == 2


async def test_of_a_prefix_that_is_here_no_more_the_rest_goes_and_the_end_is_a_failure(
    start_store: Start, connect: Connect
) -> None:
    async with listening() as ear:
        stores = await asyncio.to_thread(Stores, ear, start_store, connect)
        await asyncio.to_thread(stores.put, COUNT - 2)
        await stores.linked()
        await stores.tell("source", order(stores.target.address))
        await until_on_thread(lambda: ("target", Stage.FAILED) in ear.stages("r/0/0/pull/1"))
        there = await asyncio.to_thread(stores.reader.exists, [page_name(number) for number in range(COUNT)])
        assert there == [True] * (COUNT - 2) + [False] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"push_to": "192.0.2.7:9"}, "not a peer of this store"),
        ({"push_to": "nowhere"}, "not host:port"),
        ({"total_tokens": 7}, "are not the pages"),
        ({"names": []}, "are not the pages"),
        ({"names": [b"short"] * COUNT}, "16 bytes"),
        ({"format": msgspec.structs.replace(FORMAT, layers=5)}, "no page of that format"),
        ({"format": msgspec.structs.replace(FORMAT, layers=5), "push_to": "nowhere"}, "no page of that format"),
        ({"format": msgspec.structs.replace(FORMAT, layers=5), "push_to": "192.0.2.7:9"}, "no page of that format"),
    ],
)
async def test_an_order_that_cannot_be_carried_out_fails_at_once_and_costs_nothing(
    start_store: Start, connect: Connect, change: dict[str, Any], reason: str
) -> None:
    async with listening() as ear:
        stores = await asyncio.to_thread(Stores, ear, start_store, connect)
        await stores.linked()
        await stores.tell("source", order(**{"push_to": stores.target.address} | change))
        await until_on_thread(lambda: ("source", Stage.FAILED) in ear.stages("r/0/0/pull/1"))
        assert reason in ear.event("r/0/0/pull/1", Stage.FAILED).reason
        assert ear.event("r/0/0/pull/1", Stage.FAILED).unreachable is ("not a peer" in reason)
        counts = await asyncio.to_thread(stores.writer.describe)
        assert (counts["push_orders_refused"], counts["transfers_open"], counts["pushes_open"]) == (1, 0, 0)


@pytest.mark.slow
async def test_a_target_that_is_gone_or_hangs_fails_the_order(start_store: Start, connect: Connect) -> None:
    async with listening() as ear:
        stores = await asyncio.to_thread(Stores, ear, start_store, connect, "store.stalled_push_s = 2")
        await asyncio.to_thread(stores.put, COUNT)
        await stores.linked()
        stores.target.signal(signal.SIGSTOP)
        await stores.tell("source", order(stores.target.address, "hangs"))
        await until_on_thread(lambda: ("source", Stage.FAILED) in ear.stages("hangs"))
        await asyncio.to_thread(stores.target.kill)
        await stores.tell("source", order(stores.target.address, "gone"))
        await until_on_thread(lambda: ("source", Stage.FAILED) in ear.stages("gone"))
        assert [ear.event(name, Stage.FAILED).unreachable for name in ("hangs", "gone")] == [True, True]
        counts = await asyncio.to_thread(stores.writer.describe)
        assert (counts["transfers_open"], counts["pushes_open"], counts["pages_pinned"]) == (0, 0, 0)


async def test_a_transfer_that_is_known_is_left_alone(start_store: Start, connect: Connect) -> None:
    async with listening() as ear:
        stores = await asyncio.to_thread(Stores, ear, start_store, connect)
        await stores.linked()
        names = [page_name(number) for number in range(COUNT)]
        stores.writer.open_transfer("hand-off", names, 8 * COUNT, stores.target.address)
        await until_on_thread(lambda: stores.writer.describe()["transfers_open"] == 1)
        await stores.tell("source", order(stores.target.address, "hand-off"))
        await until_on_thread(lambda: stores.writer.describe().get("push_orders_refused") == 1)
        await asyncio.to_thread(stores.put, COUNT)
        await until_on_thread(lambda: ("target", Stage.ARRIVED) in ear.stages("hand-off"))
        assert ("source", Stage.FAILED) not in ear.stages("hand-off")
