"""Two small stores under a crowd: every copy that comes out is right, and at the end every slot is accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvrelay.channel import bind_tcp, bind_unix
from kvrelay.config_text import parse
from kvrelay.errors import Overloaded
from kvrelay.store.client import StoreClient
from kvrelay.store.daemon import StoreDaemon
from kvrelay.types import Stage
from tests.patience import PATIENCE_S, until
from tests.store.conftest import FORMAT, KEY, STRIDE, page_name, payload

PAGES, NAMES, SECONDS = 24, 60, 3.0


@contextlib.asynccontextmanager
async def running(name: str, folder: Path) -> AsyncIterator[StoreDaemon]:
    remote = bind_tcp("127.0.0.1", 0)
    host, port = remote.getsockname()
    config = parse(f"store.arena_bytes = {PAGES * STRIDE}\nstore.page_lease_s = 0.2")
    daemon = StoreDaemon(config, name, KEY, (), f"{host}:{port}")
    task = asyncio.create_task(daemon.run(bind_unix(folder / name), remote, lambda info: None))
    try:
        yield daemon
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def attach(folder: Path, store: str, owner: str, grant_slots: int = 0) -> StoreClient:
    client = StoreClient(folder / store, KEY, owner=owner, format=FORMAT, grant_slots=grant_slots)
    client.start()
    assert client.wait_attached(PATIENCE_S)
    return client


def step(client: StoreClient, other: str, dice: random.Random, serial: int, owner: str) -> int:
    """One random act; how many pages were checked."""
    number = dice.randrange(NAMES)
    match dice.randrange(5):
        case 0 | 1:
            with contextlib.suppress(Overloaded):
                client.put(page_name(number), payload(number), 8)
        case 2:
            got = client.get(page_name(number))
            assert got is None or got == payload(number)
            return int(got is not None)
        case 3:
            names = [page_name(index) for index in range(number, number + 4)]
            client.open_transfer(f"{owner}/{serial}", names, 32, other)
            if dice.random() < 0.3:
                client.milestone(f"{owner}/{serial}", Stage.FAILED, reason="aborted")
        case _:
            client.acquire(f"l{dice.randrange(3)}", [page_name(number)], 0.3).result(PATIENCE_S)
    return 0


def crowd(folder: Path, store: str, other: str, seed: int, enough: Callable[[int], bool]) -> int:
    """One client that comes, acts and goes, again and again, for some time and until it was enough."""
    dice, checked, end, serial = random.Random(seed), 0, time.monotonic() + SECONDS, 0
    while time.monotonic() < end or not enough(checked):
        owner = f"{store}-{seed}/{serial}"
        client = attach(folder, store, owner, grant_slots=dice.choice([0, 2]))
        for _ in range(dice.randrange(60)):
            serial += 1
            checked += step(client, other, dice, serial, owner)
        client.close()
    return checked


async def idle(daemon: StoreDaemon) -> None:
    gauges = ("pages_pinned", "pages_filling", "leases_open", "slots_granted", "slots_failed", "owners")
    await until(lambda: not any(daemon.keeper.describe()[gauge] for gauge in gauges))


@pytest.mark.slow
async def test_a_crowd_on_two_small_stores_never_reads_a_wrong_page(tmp_path: Path) -> None:
    async with running("p", tmp_path) as p, running("d", tmp_path) as d:

        def enough(checked: int) -> bool:
            evicted = all(daemon.keeper.counts["pages_evicted"] for daemon in (p, d))
            return checked > 10 and evicted and d.keeper.counts["pages_received"] > 0

        work = [
            asyncio.to_thread(crowd, tmp_path, store, other.info.address, seed, enough)
            for store, other in (("p", d), ("d", p))
            for seed in range(2)
        ]
        watch = asyncio.create_task(_watch(p, d))
        checked = sum(await asyncio.gather(*work))
        watch.cancel()
        for daemon in (p, d):
            for transfer in list(daemon.keeper.transfers):
                daemon.keeper.transfers.fail(transfer, "the end", asyncio.get_running_loop().time())
        await idle(p)
        await idle(d)
        for daemon in (p, d):
            daemon.keeper.check_invariants()
            counts = daemon.keeper.describe()
            assert counts["links_crashed"] == 0
            assert counts["checksum_failures"] == 0
            assert counts["pages_evicted"] > 0
        assert checked > 20
        assert d.keeper.counts["pages_received"] > 0


async def _watch(*daemons: StoreDaemon) -> None:
    while True:
        for daemon in daemons:
            daemon.keeper.check_invariants()
        await asyncio.sleep(0.02)
