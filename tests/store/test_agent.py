"""What a store asks of NIXL, on a stand-in that keeps books: memory is never registered while it is given back."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvrelay.errors import Lost, Malformed
from kvrelay.protocol.peer import ArenaFound
from kvrelay.store.arena import Arena
from kvrelay.store.paths.agent import Agent
from kvrelay.store.paths.line import Line
from kvrelay.store.paths.onesided import OneSided
from kvrelay.store.shelf import Shelf
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
    class Acquainted(Books):
        def add_remote_agent(self, metadata: bytes) -> str:
            return "peer"

    found = ArenaFound(serial=1, format=FORMAT, slot=slot, address=address, agent=b"agent")
    path = OneSided(cast(Line, None), Agent(Acquainted()), arena, found)
    with pytest.raises(Malformed, match="no machine"):
        await path.probe(memoryview(b"pattern"))


def test_a_write_that_cannot_be_stopped_says_so() -> None:
    books = Books()
    write = Agent(books).write("peer", RUNS, RUNS)
    books.is_stuck = True
    assert not write.release()
    books.is_stuck = False
    assert write.release()
