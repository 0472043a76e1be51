"""Whoever stops reading makes the other side stop, and not remember: memory stays bounded, and others are served."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.errors import Lost
from kvrelay.protocol.client import Acquired
from kvrelay.protocol.peer import PushOpen, PushPages, PushWanted
from kvrelay.store.attachment import MAX_WAITING
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat
from tests.patience import PATIENCE_S, until_on_thread, wait_until
from tests.store.conftest import KEY, StoreProcess, page_name, payload

Start = Callable[..., StoreProcess]
Connect = Callable[..., StoreClient]

pytestmark = pytest.mark.slow

BIG = PageFormat(layers=4, kv_heads=8, head_dim=128, dtype="float32", page_tokens=32)
PAGES = 64
"""A MiB each."""


def private_bytes(pid: int) -> int:
    """Memory of a process that is not an arena's or a file's."""
    return memory(pid)["RssAnon"]


def most_private_bytes(pid: int) -> int:
    """The same at its worst, of a process that has seen no more of arenas and files since then: the kernel notes it."""
    now = memory(pid)
    return now["VmHWM"] - now["RssShmem"] - now["RssFile"]


def memory(pid: int) -> dict[str, int]:
    """What the kernel knows of the memory of a process, in bytes."""
    rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows if row[-1] == "kB"}


async def want_everything_and_read_no_more(link: Channel) -> None:
    assert isinstance(await link.recv(), PushOpen)
    offered = await link.recv()
    assert isinstance(offered, PushPages)
    await link.send(PushWanted(transfer=offered.transfer, indices=offered.indices))
    await asyncio.sleep(600)


async def test_a_store_keeps_no_copy_of_what_its_peer_does_not_read(start_store: Start, connect: Connect) -> None:
    store = start_store(pages=12_000, toml="store.stalled_push_s = 2")
    writer = connect(store, "p/1", format=BIG)
    for number in range(PAGES):
        writer.put(page_name(number), payload(number, 32, BIG), 32)
    sock = bind_tcp("127.0.0.1", 0)
    host, port = sock.getsockname()
    deaf = Listener(sock, KEY, receiver="deaf", purposes={"peer"}, serve=want_everything_and_read_no_more)
    task = asyncio.create_task(deaf.run())
    before = private_bytes(store.process.pid)
    names = [page_name(number) for number in range(PAGES)]
    writer.open_transfer("t", names, 32 * len(names), f"{host}:{port}")
    await until_on_thread(lambda: writer.describe()["pushes_failed"] == 1)
    assert most_private_bytes(store.process.pid) - before < PAGES * BIG.page_bytes / 4
    assert await asyncio.to_thread(writer.get, page_name(3)) == payload(3, 32, BIG)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_client_keeps_a_bounded_number_of_messages_that_its_store_does_not_read(
    start_store: Start, connect: Connect
) -> None:
    store = start_store()
    client = connect(store)
    arena = client.arena
    assert arena is not None
    names = [page_name(number) for number in range(1000)]
    store.signal(signal.SIGSTOP)
    asked: Future[Acquired] = client.acquire("l", names, 5)
    before, posted = private_bytes(os.getpid()), 0

    def is_detached() -> bool:
        nonlocal posted
        for _ in range(MAX_WAITING // 8):
            client.open_transfer(f"t{posted}", names, 8 * len(names), None)
            posted += 1
        return client.arena is None

    wait_until(is_detached)
    attachment_bytes = MAX_WAITING * 8 * len(names)  # a reference to each name
    for _ in range(10 * MAX_WAITING):
        client.open_transfer("more", names, 8 * len(names), None)
    assert private_bytes(os.getpid()) - before < 4 * attachment_bytes
    with pytest.raises(Lost):
        asked.result(PATIENCE_S)
    store.signal(signal.SIGCONT)
    assert client.wait_attached(PATIENCE_S)
    client.put(page_name(1), payload(1), 8)
    assert client.get(page_name(1)) == payload(1)
