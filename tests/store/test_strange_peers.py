"""What a peer says of sockets, arenas, slots and addresses is looked at before use: it costs a path, not a store."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.channel import Channel
from kvrelay.errors import Lost, Malformed
from kvrelay.protocol.peer import ArenaFound, FindArena, Met, PushWanted
from kvrelay.store.arena import Arena
from kvrelay.store.paths.agent import Agent
from kvrelay.store.paths.onesided import OneSided
from kvrelay.store.paths.shm import SharedMemory
from kvrelay.store.reception import PROBE_FORMAT, probing_ground
from kvrelay.types import SlotRef
from tests.store.conftest import FORMAT, KEY
from tests.store.test_agent import Books
from tests.store.test_late_bytes import Sender


@pytest.mark.parametrize("path", ["", "/" + "x" * 300, "/nowhere/store.sock", "/proc/1/cwd/store.sock", "a\0b"])
async def test_a_socket_that_cannot_be_here_means_another_machine(path: str) -> None:
    line: Any = None
    with pytest.raises(Lost, match="another machine"):
        await SharedMemory.open(line, KEY, "p", Met(serial=1, ticket=b"", transports=[], socket=path))


class Far:
    """The line to a peer, as far as a path asks it; ``found`` answers every question."""

    stall_s = 1.0

    def __init__(self, found: ArenaFound) -> None:
        self.link = SimpleNamespace(peer="far")
        self._found = found

    def serial(self) -> int:
        return 1

    async def ask(self, build: Any, kind: Any) -> ArenaFound:
        return self._found


@pytest.fixture
async def links() -> AsyncIterator[tuple[Channel, Channel]]:
    near, far = map(Channel, socket.socketpair())
    yield near, far
    near.close()
    far.close()


async def map_arena(links: tuple[Channel, Channel], found: ArenaFound) -> None:
    """Ask for the arena of probes and get ``found`` with a real one. Raises what the path raises."""
    near, far = links
    line: Any = Far(found)
    path = SharedMemory(line, near, b"ticket")
    theirs = probing_ground(7)
    probing = asyncio.create_task(path.probe(memoryview(b"pattern")))
    assert isinstance(await far.recv(), FindArena)
    await far.send_fds(found, [theirs.fd])
    theirs.close()
    del theirs  # an error keeps this frame, and with it the mapping
    await probing


@pytest.mark.parametrize("slot", [-1, 1 << 40])
async def test_a_slot_that_an_arena_has_not_is_not_written_to(links: tuple[Channel, Channel], slot: int) -> None:
    with pytest.raises(Malformed, match="lends slot"):
        await map_arena(links, ArenaFound(serial=1, format=PROBE_FORMAT, slot=slot))


@pytest.mark.slow
async def test_an_arena_that_was_not_asked_for_is_not_mapped_and_its_descriptor_closed(
    links: tuple[Channel, Channel],
) -> None:
    gc.collect()
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Malformed, match="not one of"):
        await map_arena(links, ArenaFound(serial=1, format=FORMAT, slot=1))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize(("address", "slot"), [(-1, 0), (1 << 63, 0), (4096, -1), (4096, 1 << 40)])
async def test_an_address_that_cannot_be_is_not_written_to(address: int, slot: int) -> None:
    line: Any = Far(ArenaFound(serial=1, format=PROBE_FORMAT, slot=slot, address=address, agent=b"far"))
    with pytest.raises(Malformed, match="no arena"):
        await OneSided.open(line, Agent(Books()), Arena.create(PROBE_FORMAT, 1, epoch=7), set())


class Forgetful(Books):
    """NIXL that knows nobody any more."""

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, peer: str) -> None:
        raise RuntimeError("NIXL_ERR_NOT_FOUND")


async def test_a_path_whose_peer_nixl_has_forgotten_closes_quietly() -> None:
    line: Any = Far(ArenaFound(serial=1, format=PROBE_FORMAT, address=4096, agent=b"\xff"))
    path = await OneSided.open(line, Agent(Forgetful()), Arena.create(PROBE_FORMAT, 1, epoch=7), set())
    path.close()
    path.close()


@pytest.mark.parametrize("slot", [-1, 1 << 20, 1 << 62])
def test_a_lent_slot_that_no_arena_has_ends_the_push(slot: int) -> None:
    sender = Sender(1)
    sender.announce(0)
    assert sender.push.next_offer(0.0) is not None
    with pytest.raises(Malformed, match="lends slots"):
        sender.push.answer(PushWanted(transfer="t", indices=[0], slots=[SlotRef(slot, 1)]), 0.0)
