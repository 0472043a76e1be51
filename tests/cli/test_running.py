"""What a doctor makes of a router's /health: all that is wrong, the worst first, and nothing twice."""

from __future__ import annotations

import msgspec

from kvrelay.cli.running import FleetHealth
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.health import examine
from kvrelay.fleet.ways import BREAKS_TO_OPEN
from kvrelay.policy.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Role, Stage
from tests.fleet.known import known_brain, member

NOW_S = 1.0


def with_a_broken_way() -> Brain:
    """Two pairs of workers on a store each, of which one does not reach the other."""
    brain = known_brain([("p0", "s1"), ("p1", "s2")], [("d0", "s1"), ("d1", "s2")])
    ways = brain.fleet.ways
    for number in range(BREAKS_TO_OPEN):
        ways.sent(f"t{number}", ("s1", "s2"), NOW_S)
        ways.heard(
            TransferEvent(store="s1", transfer=f"t{number}", stage=Stage.FAILED, reason="cut", unreachable=True), NOW_S
        )
    return brain


def complaints(brain: Brain, now: float = NOW_S) -> list[str]:
    """Of a doctor who asks a router with this ``brain``."""
    return msgspec.json.decode(msgspec.json.encode(examine(brain, now)), type=FleetHealth).complaints


def test_a_broken_way_alone_is_told_once() -> None:
    (told,) = complaints(with_a_broken_way())
    assert told.startswith("no pages get from store s1 to store s2 (cut)")


def test_a_worker_that_fell_silent_is_told_once() -> None:
    brain = known_brain([("p0", "s1"), ("p1", "s1")], [("d0", "s1"), ("d1", "s1")])
    brain.fleet.workers.stall("p0", NOW_S)
    (told,) = complaints(brain)
    assert told.startswith("worker p0 gets no work: it makes no progress")


def test_a_broken_way_does_not_hide_that_every_writer_fails() -> None:
    brain = with_a_broken_way()
    for worker in ("d0", "d1"):
        for _ in range(FAILURES_TO_OPEN):
            brain.outcomes.breakers.failed(worker, "request", NOW_S)
    told = complaints(brain, NOW_S + FIRST_PAUSE_S)
    assert told[0].startswith("degraded: every worker that can write answers refused or failed 5 requests in a row")
    assert told[1].startswith("no pages get from store s1")


def test_a_broken_way_does_not_hide_that_a_store_is_away() -> None:
    brain = with_a_broken_way()
    brain.register_worker(member("d2", Role.DECODE, "s9"), NOW_S)
    told = complaints(brain)
    assert told[0].startswith("degraded: worker 'd2' names the store 's9', which no store here is called")
    assert told[1].startswith("no pages get from store s1")
