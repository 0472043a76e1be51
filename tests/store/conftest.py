"""Real store processes and clients for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, PageName

KEY = b"k" * 32
FORMAT = PageFormat(layers=3, kv_heads=2, head_dim=16, dtype="float32", page_tokens=8)
STRIDE = 8192

_SCRIPT = """
import asyncio, signal, sys
from pathlib import Path
from kvrelay.config_text import parse
from kvrelay.store.daemon import run_store
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
toml, name, path, *routers = sys.argv[1:]
def ready(info):
    print(info.address, flush=True)
key = b"k" * 32
asyncio.run(run_store(parse(toml), name=name, socket_path=Path(path), key=key, routers=tuple(routers), ready=ready))
"""


def page_name(number: int) -> PageName:
    return PageName(number.to_bytes(16, "little"))


def payload(number: int, tokens: int = 8, format: PageFormat = FORMAT) -> bytes:
    """Bytes that only page ``number`` has."""
    size = tokens * format.token_layer_bytes * format.layers
    return np.random.default_rng(number).bytes(size)


def eventually(check: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until ``check`` holds."""
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


class StoreProcess:
    """A store of its own, to be killed."""

    def __init__(self, folder: Path, name: str = "store-0", toml: str = "", routers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.socket_path = folder / f"{name}.sock"
        self._arguments = [sys.executable, "-c", _SCRIPT, toml, name, str(self.socket_path), *routers]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._arguments, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the store did not start"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    """Start stores; ``pages`` is how many pages of ``FORMAT`` fit."""
    stores: list[StoreProcess] = []

    def start(name: str = "store-0", pages: int = 64, toml: str = "", routers: tuple[str, ...] = ()) -> StoreProcess:
        stores.append(StoreProcess(tmp_path, name, f"store.arena_bytes = {pages * STRIDE}\n{toml}", routers))
        return stores[-1]

    yield start
    for store in stores:
        store.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., StoreClient]]:
    """Attach clients."""
    clients: list[StoreClient] = []

    def attach(
        store: StoreProcess, owner: str = "w/1", grant_slots: int = 0, format: PageFormat = FORMAT
    ) -> StoreClient:
        client = StoreClient(store.socket_path, KEY, owner=owner, format=format, grant_slots=grant_slots)
        clients.append(client)
        client.start()
        assert client.wait_attached(5), client
        return client

    yield attach
    for client in clients:
        client.close()
