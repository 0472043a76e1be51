"""How fast pages come from a store's memory into an engine, learned from what stores count."""

from __future__ import annotations

import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.links import Links
from kvrelay.fleet.restores import MIN_BYTES, Restores
from kvrelay.policy.moves import RESTORE_BYTES_PER_S
from kvrelay.protocol.feed import Heartbeat
from tests.fleet.values import store

BYTES_PER_S = 4e8


def s_per_byte(links: Links, name: str = "s1") -> float:
    return links.move(name, name).s_per_byte


def counted(loads: int, size_bytes: int = 10 * MIN_BYTES) -> dict[str, int]:
    """After so many loads of this size."""
    return {"restored_bytes": loads * size_bytes, "restore_us": round(1e6 * loads * size_bytes / BYTES_PER_S)}


def test_the_bandwidth_is_that_of_what_was_loaded_between_heartbeats() -> None:
    links = Links()
    restores = Restores(links)
    for loads in range(1, 20):
        restores.heard(store(), counted(loads))
        restores.heard(store(), counted(loads))
    assert s_per_byte(links) == pytest.approx(1 / BYTES_PER_S, rel=0.01)
    assert links.move("s1", "s1").per_byte.seen == 19
    assert s_per_byte(links, "s2") == 1 / RESTORE_BYTES_PER_S


def test_small_loads_count_once_they_have_added_up() -> None:
    links = Links()
    restores = Restores(links)
    for loads in range(1, 9):
        restores.heard(store(), counted(loads, MIN_BYTES // 4))
    assert links.move("s1", "s1").per_byte.seen == 2


@pytest.mark.parametrize("counts", [{}, {"restored_bytes": MIN_BYTES}, {"restored_bytes": -5, "restore_us": 7}])
def test_counts_that_say_nothing_teach_nothing(counts: dict[str, int]) -> None:
    links = Links()
    Restores(links).heard(store(), counts)
    assert links.known() == {}


def test_the_counts_of_a_new_life_begin_at_nothing() -> None:
    links = Links()
    restores = Restores(links)
    restores.heard(store(), counted(9))
    restores.heard(store(incarnation="i2"), counted(1))
    assert links.move("s1", "s1").per_byte.seen == 2
    restores.keep_only([])
    restores.heard(store(incarnation="i2"), counted(1))
    assert links.move("s1", "s1").per_byte.seen == 3


@pytest.mark.parametrize(("incarnation", "seen"), [("i1", 1), ("ghost", 0)])
def test_a_brain_learns_from_the_heartbeats_of_stores_that_live(incarnation: str, seen: int) -> None:
    brain = Brain(dead_after_s=2.0, transfer_wait_s=10.0)
    brain.members.register_store(store(), 0.0)
    beat = Heartbeat(name="s1", incarnation=incarnation, healthy=True, counts=counted(1))
    brain.members.heartbeat(store(), beat, 0.1)
    assert brain.loads.links.move("s1", "s1").per_byte.seen == seen
