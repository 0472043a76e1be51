"""Real store processes and clients for the tests of this folder."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvrelay.protocol.peer import Manifest
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat, PageName
from tests.patience import PATIENCE_S
from tests.store.nursery import Nursery, Wish, running

KEY = b"k" * 32
FORMAT = PageFormat(layers=3, kv_heads=2, head_dim=16, dtype="float32", page_tokens=8)
STRIDE = 8192


def page_name(number: int) -> PageName:
    return PageName(number.to_bytes(16, "little"))


def payload(number: int, tokens: int = 8, format: PageFormat = FORMAT) -> bytes:
    """Bytes that only page ``number`` has."""
    size = tokens * format.token_layer_bytes * format.layers
    return np.random.default_rng(number).bytes(size)


def manifest(*segments: tuple[int, int, list[int]]) -> Manifest:
    """Of (page, layer, checksums of its shards), in the order of their bytes."""
    return Manifest(
        [page for page, _, _ in segments],
        [layer for _, layer, _ in segments],
        [each for _, _, sums in segments for each in sums],
    )


class StoreProcess:
    """A store of its own, to be killed."""

    def __init__(self, nursery: Nursery, wish: Wish) -> None:
        self.name = wish.name
        self.socket_path = Path(wish.socket_path)
        self._nursery = nursery
        self._wish = wish
        self.start()

    def start(self) -> None:
        self.process = self._nursery.start(self._wish)
        self.address = self.process.address
        assert self.address, "the store did not start"

    def signal(self, number: signal.Signals) -> None:
        self.process.signal(number)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with running() as started:
        yield started


@pytest.fixture
def start_store(tmp_path: Path, nursery: Nursery) -> Iterator[Callable[..., StoreProcess]]:
    """Start stores; ``pages`` is how many pages of ``FORMAT`` fit."""
    stores: list[StoreProcess] = []

    def start(name: str = "store-0", pages: int = 64, toml: str = "", routers: tuple[str, ...] = ()) -> StoreProcess:
        toml = f"store.arena_bytes = {pages * STRIDE}\n{toml}"
        if "stalled_push_s" not in toml:  # a busy machine may let a store rest for longer than users would
            toml += f"\nstore.stalled_push_s = {PATIENCE_S}"
        wish = Wish(toml=toml, name=name, socket_path=str(tmp_path / f"{name}.sock"), key=KEY, routers=routers)
        stores.append(StoreProcess(nursery, wish))
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
        assert client.wait_attached(PATIENCE_S), client
        return client

    yield attach
    for client in clients:
        client.close()
