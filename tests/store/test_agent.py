"""What a store asks of NIXL, on a stand-in that keeps books: memory is never registered while it is given back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvrelay.errors import Lost, Malformed, Refused
from kvrelay.protocol.message import Message
from kvrelay.protocol.peer import ArenaFound, FindArena
from kvrelay.store.arena import Arena
from kvrelay.store.batch import Batch
from kvrelay.store.paths.agent import Agent
from kvrelay.store.paths.choice import Paths, Proven
from kvrelay.store.paths.line import Line
from kvrelay.store.paths.onesided import OneSided
from kvrelay.store.paths.path import Path
from kvrelay.store.paths.trial import Score
from kvrelay.store.shelf import Shelf
from kvrelay.types import PageFormat, Transport
from tests.store.conftest import FORMAT


class Books:
    """NIXL's agent as far as it is used."""

    name = "books"

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.states = ["DONE"]
        self.is_stuck = False

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> Any:
        self.regions += [(address, size) for address, size, _, _ in regions]
        return regions

    def deregister_memory(self, regions: list[tuple[int, int, int, str]]) -> None:
        for address, size, _, _ in regions:
            self.regions.remove((address, size))

    def get_xfer_descs(self, runs: Any, kind: str) -> Any:
        return runs

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str) -> str:
        if peer == "nobody":
            raise KeyError(peer)
        return "handle"

    def transfer(self, handle: str) -> str:
        return self.states[0]

    def check_xfer_state(self, handle: str) -> str:
        return self.states.pop(0)

    def release_xfer_handle(self, handle: str) -> None:
        if self.is_stuck:
            raise RuntimeError("still moving")


@pytest.fixture
def arena() -> Arena:
    return Arena.create(FORMAT, 4, epoch=7)


RUNS = np.zeros((1, 3), np.uint64)


def test_an_arena_is_registered_once_and_taken_out_at_the_end(arena: Arena) -> None:
    books = Books()
    agent = Agent(books)
    agent.register(arena)
    agent.register(arena)
    assert books.regions == [(arena.address, 4 * arena.stride)]
    agent.close()
    agent.close()
    assert books.regions == []


def test_an_arena_that_gives_memory_back_is_taken_out_first_and_stays_out(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = Books()
    agent = Agent(books)
    shelf = Shelf(arena)
    agent.register(arena)
    (ref,) = shelf.take_cold(1)
    assert ref is not None
    shelf.free([ref.slot])
    punched: list[bool] = []
    monkeypatch.setattr(arena, "_map", _Map(lambda: punched.append(bool(books.regions))))
    assert shelf.cool()
    assert punched == [False]
    with pytest.raises(Lost, match="gives memory back"):
        agent.register(arena)


class _Map:
    def __init__(self, told: Any) -> None:
        self._told = told

    def madvise(self, *arguments: int) -> None:
        self._told()


def test_a_write_is_done_or_lost_and_whatever_nixl_raises_is_lost(arena: Arena) -> None:
    books = Books()
    agent = Agent(books)
    books.states = ["PROC", "PROC", "DONE"]
    write = agent.write("peer", RUNS, RUNS)
    assert not write.is_done
    assert not write.is_done
    assert write.is_done
    books.states = ["PROC", "ERR"]
    write = agent.write("peer", RUNS, RUNS)
    assert not write.is_done
    with pytest.raises(Lost):
        assert write.is_done
    with pytest.raises(Lost):
        agent.write("nobody", RUNS, RUNS)
    books.states = ["ERR"]
    with pytest.raises(Lost):
        agent.write("peer", RUNS, RUNS)


def test_a_peer_that_nixl_has_lost_already_is_forgotten_without_a_word() -> None:
    class Forgetful(Books):
        def remove_remote_agent(self, peer: str) -> None:
            raise KeyError(peer)

    Agent(Forgetful()).forget("peer")


@pytest.mark.parametrize(("address", "slot"), [((1 << 64) - 1, 1), (0, (1 << 64) - 1), (1 << 200, 0)])
async def test_a_peer_whose_arena_is_beyond_any_memory_is_not_written_to(arena: Arena, address: int, slot: int) -> None:
    found = ArenaFound(serial=1, format=FORMAT, slot=slot, address=address, agent=b"agent")
    path = OneSided(cast(Line, None), Agent(Acquainted()), arena, found, set())
    with pytest.raises(Malformed, match="no machine"):
        await path.probe(memoryview(b"pattern"))


class Acquainted(Books):
    """It knows every peer."""

    def add_remote_agent(self, metadata: bytes) -> str:
        return "peer"

    def remove_remote_agent(self, peer: str) -> None: ...


class Peer:
    """The far end of a line; ``agent``: what it lets others write with."""

    def __init__(self, agent: bytes = b"agent") -> None:
        self.link = SimpleNamespace(peer="peer")
        self.stall_s = 1.0
        self.agent = agent
        self.asked = 0

    async def ask(self, build: Callable[[int], Message], kind: type[Message]) -> ArenaFound:
        self.asked += 1
        message = build(1)
        assert isinstance(message, FindArena)
        agent = self.agent if message.format is not None else b"agent"
        return ArenaFound(serial=1, format=message.format or FORMAT, address=4096, agent=agent)


def batch_of(arena: Arena) -> Batch:
    return cast(Batch, SimpleNamespace(arena=arena, has_lent_slots=True))


@pytest.mark.parametrize("is_ours", [True, False])
async def test_an_arena_that_cannot_be_written_is_found_out_once_however_often_the_path_is_opened(
    arena: Arena, is_ours: bool
) -> None:
    peer, agent, refused = Peer(b"agent" if is_ours else b""), Agent(Acquainted()), set[PageFormat]()
    healthy = Arena.create(msgspec.structs.replace(FORMAT, layers=1), 4, epoch=7)
    probes = Arena.create(FORMAT, 1, epoch=7)
    if is_ours:
        agent.register(arena)
        agent.withdraw(arena)
    path = await OneSided.open(cast(Line, peer), agent, probes, refused)
    assert path.takes(batch_of(arena))
    with pytest.raises(Refused):
        await path.carry(batch_of(arena))
    asked = peer.asked
    for each in (path, await OneSided.open(cast(Line, peer), agent, probes, refused)):
        assert not each.takes(batch_of(arena))
        assert each.takes(batch_of(healthy))
    assert peer.asked == asked + 1, "only the arena for probes was asked for"


class Picky:
    """A path that refuses one batch and carries the others."""

    transport = Transport.NIXL

    def __init__(self) -> None:
        self.carried: list[str] = []
        self.closed = False

    def takes(self, batch: Batch) -> bool:
        return True

    async def carry(self, batch: Batch) -> int:
        if batch.message.transfer == "refused":
            raise Refused("planted")
        self.carried.append(batch.message.transfer)
        return 0

    def close(self) -> None:
        self.closed = True


async def test_a_batch_that_a_path_refuses_goes_the_next_way_and_others_keep_theirs() -> None:
    picky, last = Picky(), Picky()
    paths = Paths(cast(Line, Peer()), cast(Path, last), {}, lambda: 0.0)
    paths._proven = [Proven(cast(Path, picky), Score(latency_s=0.001, bytes_per_s=1e9))]
    refused, other = (cast(Batch, SimpleNamespace(message=SimpleNamespace(transfer=id))) for id in ("refused", "other"))
    with pytest.raises(Lost):  # the last way refuses it too
        await paths.carry(refused)
    assert not picky.closed
    assert await paths.carry(other) == 0
    assert (picky.carried, last.carried) == (["other"], [])


def test_a_write_that_cannot_be_stopped_says_so() -> None:
    books = Books()
    write = Agent(books).write("peer", RUNS, RUNS)
    books.is_stuck = True
    assert not write.release()
    books.is_stuck = False
    assert write.release()
