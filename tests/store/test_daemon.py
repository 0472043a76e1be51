"""Starting a store: what it refuses, what it tells, and that nothing of a killed one is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay import channel
from kvrelay.channel import MAX_CRASHES, Channel, Listener, bind_tcp, bind_unix
from kvrelay.channel import connect as connect_link
from kvrelay.config_text import parse
from kvrelay.errors import Misconfigured
from kvrelay.protocol.feed import Heartbeat
from kvrelay.store.client import StoreClient
from kvrelay.store.daemon import run_store
from kvrelay.store.session import Session
from kvrelay.types import StoreInfo
from tests.patience import PATIENCE_S, wait_until
from tests.store.conftest import KEY, StoreProcess, page_name, payload

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]


async def start_and_stop(toml: str, path: Path) -> StoreInfo:
    """Run a store until it is ready."""
    ready: asyncio.Future[StoreInfo] = asyncio.get_running_loop().create_future()
    work = run_store(parse(toml), name="s", socket_path=path, key=KEY, routers=(), ready=ready.set_result)
    task = asyncio.create_task(work)
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    await asyncio.wait((task,))
    if not ready.done():
        task.result()
    return ready.result()


async def test_every_address_needs_an_advertised_one(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"store\.advertise"):
        await start_and_stop('store.peer_host = "0.0.0.0"', tmp_path / "s")
    info = await start_and_stop('store.peer_host = "0.0.0.0"\nstore.advertise = "10.0.0.7:7000"', tmp_path / "s")
    assert info.address == "10.0.0.7:7000"


@pytest.mark.slow
async def test_a_store_tells_where_it_is_and_how_much_it_holds(tmp_path: Path) -> None:
    info = await start_and_stop("store.arena_bytes = 1000000", tmp_path / "s")
    assert (info.name, info.capacity_bytes) == ("s", 1_000_000)
    assert info.address.startswith("127.0.0.1:")
    again = await start_and_stop("", tmp_path / "s")
    assert again.incarnation != info.incarnation


async def test_an_address_that_cannot_be_had_is_named_with_the_setting_to_change(tmp_path: Path) -> None:
    with bind_tcp("127.0.0.1", 0) as taken, pytest.raises(Misconfigured, match=r"in use; .*store\.peer_port"):
        await start_and_stop(f"store.peer_port = {taken.getsockname()[1]}", tmp_path / "s")
    with bind_unix(tmp_path / "s"), pytest.raises(Misconfigured, match=r"another process listens here; .*--socket"):
        await start_and_stop("", tmp_path / "s")
    with pytest.raises(Misconfigured, match=r"its folder does not exist; .*--socket"):
        await start_and_stop("", tmp_path / "nowhere" / "s")
    with pytest.raises(Misconfigured, match=r"too long; .*--socket"):
        await start_and_stop("", tmp_path / ("s" * 120))
    assert (await start_and_stop("", tmp_path / "s")).name == "s"


def test_a_second_store_on_the_same_socket_does_not_push_the_first_aside(start_store: Start, connect: Connect) -> None:
    first = start_store()
    with pytest.raises(AssertionError, match="did not start"):
        start_store()
    client = connect(first)
    client.put(page_name(1), payload(1), 8)
    assert client.get(page_name(1)) == payload(1)


async def test_a_store_whose_links_crash_again_and_again_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[Heartbeat] = []

    async def listen(link: Channel) -> None:
        while True:
            message = await link.recv()
            beats.extend([message] if isinstance(message, Heartbeat) else [])

    async def crash(session: Session) -> None:
        raise ZeroDivisionError

    async def heard(*, healthy: bool | None = None, crashes: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not beats or healthy not in (None, beats[-1].healthy) or beats[-1].counts["links_crashed"] < crashes:
                await asyncio.sleep(0.01)

    control = bind_tcp("127.0.0.1", 0)
    router = f"127.0.0.1:{control.getsockname()[1]}"
    listener = Listener(control, KEY, receiver="router", purposes={"feed"}, serve=listen)
    settings = parse("cluster.heartbeat_s = 0.05\ncluster.dead_after_s = 1")
    work = run_store(settings, name="s", socket_path=tmp_path / "s", key=KEY, routers=(router,))
    tasks = [asyncio.create_task(part) for part in (listener.run(), work)]
    try:
        await heard(healthy=True)
        monkeypatch.setattr(Session, "serve", crash)
        for number in range(MAX_CRASHES):
            assert all(beat.healthy for beat in beats), f"{number} crashes"
            (await connect_link(tmp_path / "s", KEY, sender="c", purpose="client")).close()
            await heard(crashes=number + 1)
        await heard(healthy=False)
        monkeypatch.setattr(channel, "CRASH_WINDOW_S", 0.1)
        await heard(healthy=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mapped() -> int:
    """How many arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("kvrelay-arena")


def test_the_memory_of_a_killed_store_is_gone_as_soon_as_its_clients_noticed(
    start_store: Start, connect: Connect
) -> None:
    gc.collect()
    gc.disable()
    try:
        before = mapped()
        store = start_store(pages=4096)
        client = connect(store)
        for number in range(200):
            client.put(page_name(number), payload(number), 8)
        assert client.describe()["bytes_used"] == 200 * 8192
        assert mapped() == before + 1
        store.kill()
        wait_until(lambda: client.arena is None)
        wait_until(lambda: mapped() == before)
    finally:
        gc.enable()
    assert not [name for name in os.listdir("/dev/shm") if "kvrelay" in name]


def test_an_interrupted_store_ends_cleanly(start_store: Start, connect: Connect) -> None:
    store = start_store()
    client = connect(store, grant_slots=2)
    store.signal(signal.SIGINT)
    store.process.wait(PATIENCE_S)
    assert not store.socket_path.exists()
    wait_until(lambda: client.arena is None)
