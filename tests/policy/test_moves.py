"""Links and loads: what a move takes, and what a push leaves to be seen."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvrelay.policy.moves import Move, link


@pytest.mark.parametrize(
    ("size", "in_flight", "hidden", "left"),
    [(0, 0, 0.0, 0.005), (1e9, 0, 0.0, 1.005), (1e9, 0, 0.4, 0.605), (1e9, 0, 2.0, 0.005), (1e9, 1e9, 0.5, 1.505)],
)
def test_compute_hides_a_push_up_to_its_latency(size: float, in_flight: float, hidden: float, left: float) -> None:
    assert link().exposed_s(size, in_flight, hidden) == pytest.approx(left)


@pytest.mark.parametrize("bytes_per_s", [5e7, 1.2e9, 4e10])
@pytest.mark.parametrize("latency_s", [0.0005, 0.02])
def test_bandwidth_and_latency_are_learned_from_what_pushes_leave(bytes_per_s: float, latency_s: float) -> None:
    way, chance = link(), random.Random(1)
    for _ in range(100):
        size, hidden = chance.choice((1e6, 3e7, 4e8)), chance.choice((0.001, 0.02, 0.3))
        left = latency_s + max(0.0, size / bytes_per_s - hidden)
        late_bytes = max(0.0, size - hidden * bytes_per_s)
        way = way.saw_moving(size, size / bytes_per_s * chance.lognormvariate(0, 0.1))
        way = way.saw_exposed(late_bytes, left * chance.lognormvariate(0, 0.05))
    for size, hidden in ((4e8, 0.02), (3e7, 0.3)):
        left = latency_s + max(0.0, size / bytes_per_s - hidden)
        assert way.exposed_s(size, 0.0, hidden) == pytest.approx(left, rel=0.25, abs=0.002)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.01, 2e8), (0.0001, 3e9), (0.3, 1e9)])
def test_a_move_that_nothing_hides_is_learned_as_it_is(latency_s: float, bytes_per_s: float) -> None:
    way = link()
    for size in (1e6, 1e8, 1e7) * 20:
        way = way.saw(size, latency_s + size / bytes_per_s)
    assert way.seconds(1e8) == pytest.approx(latency_s + 1e8 / bytes_per_s, rel=0.1)
    assert way.seconds(0.0) == pytest.approx(latency_s, rel=0.3, abs=0.001)
    assert msgspec.json.decode(msgspec.json.encode(way), type=Move) == way
