"""What workers and stores report reaches the router's index over real links, and goes when they go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvrelay.errors import Lost
from kvrelay.feed import Feed
from kvrelay.fleet import event_stream
from kvrelay.fleet.index import store_key
from kvrelay.fleet.page_log import PageLog
from kvrelay.protocol.feed import (
    Heartbeat,
    PageChange,
    PageEvents,
    PageSnapshot,
    PagesWanted,
    RegisterStore,
    RegisterWorker,
)
from kvrelay.protocol.message import Message
from kvrelay.types import Medium, Role, StoreInfo, WorkerInfo
from tests.fleet.values import names, store, worker
from tests.patience import until
from tests.router.cluster import KEY, Cluster, Member

HBM, MEMORY = Medium.HBM, Medium.MEMORY


@contextlib.asynccontextmanager
async def feeding(cluster: Cluster, info: WorkerInfo | StoreInfo, log: PageLog) -> AsyncIterator[None]:
    """A real member's feed; it says goodbye at the end."""
    feed = Feed(
        (cluster.control,),
        KEY,
        sender=info.name,
        registration=RegisterWorker(worker=info) if isinstance(info, WorkerInfo) else RegisterStore(store=info),
        heartbeat=lambda: Heartbeat(name=info.name, incarnation=info.incarnation, healthy=True),
        heartbeat_s=0.1,
        pages=log,
    )
    task = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_member_that_was_there_before_the_router_is_known_with_all_its_pages(cluster: Cluster) -> None:
    index, log = cluster.router.brain.index, PageLog("i1")
    log.store(names(*range(20_000)), MEMORY)
    async with feeding(cluster, store(), log):
        await until(lambda: index.count(store_key("s1")) == 20_000)
        log.remove(names(*range(0, 20_000, 2)), MEMORY)
        await until(lambda: index.count(store_key("s1")) == 10_000)
        assert await cluster.metric("kvrelay_store_pages") == 10_000
        assert await cluster.metric("kvrelay_index_pages") == 10_000
    await until(lambda: index.count(store_key("s1")) == 0)


async def test_a_worker_that_falls_silent_has_no_pages_and_gets_them_back_when_it_speaks(cluster: Cluster) -> None:
    index, member = cluster.router.brain.index, await cluster.join(worker("p1", Role.PREFILL))
    assert await member.link.recv() == PagesWanted(after=-1)
    await member.send(snapshot(5, 1, 2))
    await until(lambda: index.count("p1") == 2)
    member.silent = True
    await until(lambda: index.count("p1") == 0)
    member.silent = False
    # Its heartbeats are enough: it may have no news for long.
    assert await member.link.recv() == PagesWanted(after=-1)
    await member.send(snapshot(6, 1, 2, 3))
    await until(lambda: index.count("p1") == 3)


def snapshot(sequence: int, *numbers: int) -> PageSnapshot:
    return PageSnapshot(incarnation="i1", sequence=sequence, part=0, last=True, medium=HBM, names=names(*numbers))


def events(sequence: int, *numbers: int) -> PageEvents:
    return PageEvents(incarnation="i1", sequence=sequence, changes=[PageChange(HBM, [], names(*numbers))])


async def test_a_gap_is_asked_about_at_once_and_shows_in_the_metrics(cluster: Cluster) -> None:
    index, member = cluster.router.brain.index, await cluster.join(worker("p1", Role.PREFILL))
    assert await member.link.recv() == PagesWanted(after=-1)
    for message in (snapshot(1, 1), events(2, 2), events(4, 4)):
        await member.send(message)
    assert await member.link.recv() == PagesWanted(after=2)
    assert index.count("p1") == 2
    for message in (events(3, 3), events(4, 4)):
        await member.send(message)
    await until(lambda: index.count("p1") == 4)
    assert await cluster.metric("kvrelay_index_gaps_total") == 1


async def wanted_but(after: int, member: Member) -> Message:
    """The next that it is asked for but what follows ``after``, for which it may be asked any number of times."""
    while (asked := await member.link.recv()) == PagesWanted(after=after):
        pass
    return asked


async def test_a_quiet_worker_is_asked_again_for_what_it_did_not_tell(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "REPAIR_S", 0.2)
    index, member = cluster.router.brain.index, await cluster.join(worker("p1", Role.PREFILL))
    for _ in range(2):
        assert await member.link.recv() == PagesWanted(after=-1)
    for message in (snapshot(1, 1), events(3, 3)):
        await member.send(message)
    assert await wanted_but(-1, member) == PagesWanted(after=1)
    assert await wanted_but(1, member) == PagesWanted(after=-1)
    assert index.count("p1") == 0
    await member.send(snapshot(3, 1, 2, 3))
    await until(lambda: index.count("p1") == 3)


async def test_a_new_incarnation_takes_the_place_of_the_old_one_whose_words_count_no_more(cluster: Cluster) -> None:
    index, old = cluster.router.brain.index, await cluster.dial(worker("p1", Role.PREFILL))
    await old.send(snapshot(1, 1))
    await until(lambda: index.count("p1") == 1)
    await until(lambda: not cluster.is_ready("p1"))  # or it would keep its name
    new = await cluster.join(worker("p1", Role.PREFILL, incarnation="i2"))
    assert await new.link.recv() == PagesWanted(after=-1)
    await old.send(events(2, 2))
    await until(lambda: index.stale == 1)
    assert index.count("p1") == 0


@pytest.mark.parametrize("name", [b"short", b"x" * 17])
async def test_a_name_of_another_length_ends_the_link(cluster: Cluster, name: bytes) -> None:
    member = await cluster.dial(worker("p1", Role.PREFILL))
    assert await member.link.recv() == PagesWanted(after=-1)
    with contextlib.suppress(Lost):
        await member.send(PageEvents(incarnation="i1", sequence=1, changes=[PageChange(HBM, [], [name])]))  # type: ignore[list-item]
    with pytest.raises(Lost):
        await member.link.recv()
