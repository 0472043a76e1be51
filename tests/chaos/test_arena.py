"""A store of which every slot is in use by somebody else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.deploy.chaos.arena import ArenaVictims
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost, Overloaded
from kvrelay.store.client import StoreClient
from tests.patience import PATIENCE_S, until
from tests.store.conftest import FORMAT, KEY, page_name, payload
from tests.store.nursery import Wish, running


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Of a store with room for 60 pages of 64 kB."""
    path = tmp_path / "store.sock"
    with running() as nursery:
        store = nursery.start(Wish(toml="store.arena_bytes = 4000000", name="s", socket_path=str(path), key=KEY))
        yield path
        store.signal(signal.SIGKILL)
        store.wait(PATIENCE_S)


@pytest.fixture
def client(socket: Path) -> Iterator[StoreClient]:
    made = StoreClient(socket, KEY, owner="w/1", format=FORMAT)
    made.start()
    assert made.wait_attached(PATIENCE_S)
    yield made
    made.close()


def has_room(client: StoreClient) -> bool:
    """For fifty pages, of which the last is found."""
    try:
        client.put_many([(page_name(number), payload(number), 8) for number in range(50)])
    except Overloaded:
        return False
    return client.get(page_name(49)) == payload(49)


@pytest.mark.slow
async def test_a_full_store_refuses_pages_and_takes_them_once_it_has_room(socket: Path, client: StoreClient) -> None:
    victims = ArenaVictims([socket], KEY)
    assert await victims.targets() == [Target(name=str(socket), kind="store", deeds=(Deed.FULL_ARENA,))]
    assert await asyncio.to_thread(has_room, client)
    await victims.hurt(str(socket), Deed.FULL_ARENA)
    await until(lambda: not has_room(client))
    await victims.end()
    await until(lambda: has_room(client))


async def test_a_store_that_is_away_is_nobody_to_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.deploy.chaos.arena._ATTACH_S", 0.05)
    victims = ArenaVictims([tmp_path / "nobody.sock"], KEY)
    with pytest.raises(Lost, match="no store answers"):
        await victims.hurt(str(tmp_path / "nobody.sock"), Deed.FULL_ARENA)
    await victims.end()
