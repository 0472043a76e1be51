"""A hot prefix that all want at once, and all that can go wrong meanwhile: it is computed about once, spread over all
workers, and nobody waits longer than he was told.

With faults about one in sixty computes the prefix again: the first ones after it changed, and those that had waited
long enough for a worker that hung.
"""

from __future__ import annotations

import pytest

from kvrelay.policy.patience import HELD_MARGIN, HELD_SLACK_S
from tests.fleet.hot_world import PAGE, TICK_S, World
from tests.fleet.known import ask

PREFIX, OWN = 32 * PAGE, 3 * PAGE
BURST = 16
PER_PREFIX = 400
"""Requests before another prefix is the hot one."""


def serve(requests: int, *, nodes: int, faults: float, seed: int = 1, gap_s: float = 1.2) -> World:
    """Bursts of requests at one moment, of which nine in ten share the hot prefix."""
    world = World(nodes, 4, faults=faults, seed=seed)
    left = requests

    def burst() -> None:
        nonlocal left
        for _ in range(min(BURST, left)):
            left -= 1
            hot = world.dice.random() < 0.9
            prefix = 1 + left // PER_PREFIX if hot else 1_000_000 + left
            name = f"{'hot' if hot else 'cold'}-{left}"
            world.come(ask(name, (prefix, PREFIX), (2_000_000 + left, OWN), now=world.now, page_tokens=PAGE))
        if world.faults and world.unlucky():
            world.restart(f"p{world.dice.randrange(4)}")
        if left:
            world.later(gap_s, burst)

    world.later(0.0, burst)
    world.run(lambda: left == 0)
    return world


def hits(world: World) -> tuple[int, int]:
    """Hot requests that were computed, and those of them that computed their own part alone."""
    seen = [cached for name, cached in world.computed.items() if name.startswith("hot")]
    return len(seen), sum(cached >= PREFIX for cached in seen)


def check(world: World, requests: int) -> None:
    """Every request has ended, and nothing is left of any."""
    assert world.statuses.total() == requests
    brain = world.brain
    brain.check_invariants()
    assert brain.in_flight == len(brain.prefixes.holds) == len(brain.prefixes.underway) == 0
    assert repr(brain.loads) == "<Loads 0 prefill legs, 0 sequences>"


def longest_beyond_s(world: World) -> float:
    """By how much the longest wait went on beyond its predicted time and the margin; ticks have their own."""
    lines = [world.brain.ledger.get(name) for name in world.computed]
    waits = [wait for line in lines if line is not None for wait in line.waits if wait.waited_s is not None]
    assert waits
    return max(
        wait.waited_s - wait.predicted_s * (1 + HELD_MARGIN) - HELD_SLACK_S  # type: ignore[operator]
        for wait in waits
    )


@pytest.mark.parametrize("nodes", [2, *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in (1, 4))])
def test_a_hot_prefix_is_computed_about_once_and_its_workers_share_the_rest(nodes: int) -> None:
    world = serve(400, nodes=nodes, faults=0.0)
    check(world, 400)
    assert world.statuses[200] == 400
    asked, hit = hits(world)
    # Pure affinity computes the prefix once.
    assert hit >= 0.8 * (asked - 1)
    worked = [engine.worked_s for engine in world.engines.values()]
    assert max(worked) <= 2 * sum(worked) / len(worked)
    assert longest_beyond_s(world) <= TICK_S


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_requests_with_faults_all_end_and_leave_nothing() -> None:
    world = serve(10_000, nodes=2, faults=0.1)
    check(world, 10_000)
    asked, hit = hits(world)
    assert hit >= 0.8 * (asked - 10_000 / PER_PREFIX)
    worked = [engine.worked_s for engine in world.engines.values()]
    assert max(worked) <= 2 * sum(worked) / len(worked)
    assert longest_beyond_s(world) <= TICK_S
    assert world.statuses[200] > 9_000
