"""What an operator is told."""

from __future__ import annotations

import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.drain_command import DrainCommand
from kvrelay.fleet.health import examine, serves_unless_drained
from kvrelay.policy.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S
from kvrelay.types import Role
from tests.fleet.values import store, worker


def brain() -> Brain:
    made = Brain(dead_after_s=2.0, transfer_wait_s=10.0)
    made.members.register_store(store(), 0.0)
    return made


def test_without_anybody_who_decodes_it_is_unavailable_and_says_what_to_start() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    health = examine(fleet, 0.0)
    assert (health.status, health.serving) == ("unavailable", False)
    assert "start one" in health.why


def test_a_split_pair_is_ok_until_its_workers_fall_silent() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    fleet.register_worker(worker("d", Role.DECODE), 0.0)
    assert (examine(fleet, 1.0).status, examine(fleet, 1.0).unpaired) == ("ok", [])
    silent = examine(fleet, 3.0)
    assert silent.status == "unavailable"
    assert [row["ready"] for row in silent.workers + silent.stores] == [False, False, False]


def test_workers_that_cannot_exchange_are_named_with_the_field() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL, weights="a"), 0.0)
    fleet.register_worker(worker("d", Role.DECODE, weights="b"), 0.0)
    health = examine(fleet, 0.0)
    assert (health.status, health.serving) == ("degraded", True)
    assert health.unpaired == [{"prefill": "p", "decode": "d", "reason": "fingerprint.weights"}]
    assert "d (fingerprint.weights is not that of p)" in health.why


def test_two_revisions_that_each_have_their_pair_are_ok() -> None:
    fleet = brain()
    for weights in ("old", "new"):
        fleet.register_worker(worker(f"p-{weights}", Role.PREFILL, weights=weights), 0.0)
        fleet.register_worker(worker(f"d-{weights}", Role.DECODE, weights=weights), 0.0)
    health = examine(fleet, 0.0)
    assert (health.status, len(health.unpaired), health.stranded) == ("ok", 2, [])


def test_a_new_worker_that_nobody_understands_is_told_with_the_field() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    fleet.register_worker(worker("d", Role.DECODE), 0.0)
    fleet.register_worker(worker("d-new", Role.DECODE, dtype="float16"), 0.0)
    health = examine(fleet, 0.0)
    assert health.status == "degraded"
    assert health.stranded == [{"worker": "d-new", "other": "p", "reason": "fingerprint.format.dtype"}]


def test_a_fleet_that_decodes_only_is_degraded_and_serves() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    fleet.register_worker(worker("d", Role.DECODE), 0.0)
    fleet.leaving(worker("p", Role.PREFILL), 0.0)
    health = examine(fleet, 0.0)
    assert (health.status, health.serving) == ("degraded", True)
    assert "no prefill worker is ready for d;" in health.why


def fleet_of_two_each() -> Brain:
    fleet = brain()
    for number in range(2):
        fleet.register_worker(worker(f"p{number}", Role.PREFILL), 0.0)
        fleet.register_worker(worker(f"d{number}", Role.DECODE), 0.0)
    return fleet


def beat(fleet: Brain, *names: str, now: float, healthy: bool = True) -> None:
    for name in names:
        fleet.fleet.workers.hear(name, "i1", healthy=healthy, counts={}, now=now)


def test_a_worker_that_falls_silent_beside_others_is_named_until_it_is_heard_again() -> None:
    fleet = fleet_of_two_each()
    fleet.members.register_store(store(), 3.0)
    beat(fleet, "p1", "d0", "d1", now=3.0)
    health = examine(fleet, 3.0)
    assert (health.status, health.serving, health.why_is_listed) == ("degraded", True, True)
    assert health.not_ready == [{"worker": "p0", "why": "nothing was heard of it for 3 s"}]
    assert "p0 (nothing was heard of it for 3 s)" in health.why
    beat(fleet, "p0", now=4.0)
    assert (examine(fleet, 4.0).status, examine(fleet, 4.0).not_ready) == ("ok", [])


def test_workers_that_say_that_they_are_unwell_or_that_stall_are_named_too() -> None:
    fleet = fleet_of_two_each()
    beat(fleet, "d1", now=1.0, healthy=False)
    fleet.fleet.workers.stall("p1", 1.0)
    assert [row["worker"] for row in examine(fleet, 1.5).not_ready] == ["d1", "p1"]
    assert examine(fleet, 1.5).status == "degraded"


def test_who_said_goodbye_or_drains_is_away_as_meant() -> None:
    fleet = fleet_of_two_each()
    fleet.leaving(worker("p0", Role.PREFILL), 0.0)
    fleet.drains.begin("d0", 0.0)
    assert (examine(fleet, 1.0).status, examine(fleet, 1.0).not_ready) == ("ok", [])


@pytest.mark.parametrize(("name", "status"), [("p", "degraded"), ("d", "unavailable")])
def test_draining_is_told_where_it_is_the_reason(name: str, status: str) -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    fleet.register_worker(worker("d", Role.DECODE), 0.0)
    fleet.drains.begin(name, 0.0, force=True)
    health = examine(fleet, 0.0)
    assert health.status == status
    assert f"draining, so without new work: {name}; start another, or" in health.why
    assert health.why.endswith(f": kvrelay drain {name} --undo --key-file FILE")
    drain = DrainCommand(program=("/opt/my venv/kvrelay",), router="10.0.0.1:7081", key_file="/run/k/key")
    whole = f": '/opt/my venv/kvrelay' drain {name} --undo --router 10.0.0.1:7081 --key-file /run/k/key"
    assert examine(fleet, 0.0, drain).why.endswith(whole)
    silent = examine(fleet, 3.0)
    assert "draining" not in silent.why, "who is dead gets no work back by --undo"


def test_workers_of_two_models_are_not_called_unpaired() -> None:
    fleet = brain()
    for model in ("a", "b"):
        fleet.register_worker(worker(f"p-{model}", Role.PREFILL, model=model, weights=model), 0.0)
        fleet.register_worker(worker(f"d-{model}", Role.DECODE, model=model, weights=model), 0.0)
    assert (examine(fleet, 0.0).status, examine(fleet, 0.0).unpaired) == ("ok", [])
    fleet.leaving(worker("p-b", Role.PREFILL), 0.0)
    assert "ready for d-b;" in examine(fleet, 0.0).why


def test_colocated_workers_are_not_called_unpaired() -> None:
    fleet = brain()
    for name in ("b1", "b2"):
        fleet.register_worker(worker(name), 0.0)
    assert examine(fleet, 0.0).status == "ok"


def test_a_worker_whose_store_nobody_knows_is_told_with_what_to_do() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL, store="stroe"), 0.0)
    fleet.register_worker(worker("d", Role.DECODE), 0.0)
    health = examine(fleet, 0.0)
    assert (health.status, health.serving) == ("degraded", True)
    assert "worker 'p' names the store 'stroe', which no store here is called" in health.why
    assert "--store-name" in health.why


def test_a_store_that_fell_silent_is_told_apart_from_one_that_never_came() -> None:
    fleet = brain()
    fleet.register_worker(worker("b"), 2.5)
    assert examine(fleet, 2.5).why == f"store {store().name!r} of worker 'b' is not heard; see its log"


@pytest.mark.parametrize(("drained", "serves"), [("d", True), ("p", False)])
def test_only_who_could_answer_and_drains_excuses_that_nobody_does(drained: str, serves: bool) -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    if serves:
        fleet.register_worker(worker("d", Role.DECODE), 0.0)
    fleet.drains.begin(drained, 0.0, force=True)
    assert not examine(fleet, 0.0).serving
    assert serves_unless_drained(fleet, 0.0) is serves


def _fail(fleet: Brain, name: str) -> None:
    for _ in range(FAILURES_TO_OPEN):
        fleet.outcomes.breakers.failed(name, "request", 0.0)


def test_a_fleet_whose_every_decode_worker_fails_is_unavailable_until_one_may_be_tried_again() -> None:
    fleet = brain()
    fleet.register_worker(worker("p", Role.PREFILL), 0.0)
    for name in ("d1", "d2"):
        fleet.register_worker(worker(name, Role.DECODE), 0.0)
    _fail(fleet, "d1")
    assert examine(fleet, 0.0).status == "ok", "the other one answers"
    _fail(fleet, "d2")
    shut = examine(fleet, 0.0)
    assert (shut.status, shut.serving) == ("unavailable", False)
    assert "d1 (circuit breaker open), d2 (circuit breaker open); all requests get 503" in shut.why
    may_probe = examine(fleet, FIRST_PAUSE_S)
    assert (may_probe.status, may_probe.serving) == ("degraded", True), "or a balancer would keep the probe away"
    assert "the next request tries one of them again" in may_probe.why
    fleet.outcomes.breakers.sent("d1", "probe")
    fleet.outcomes.breakers.sent("d2", "probe")
    assert "d1 (circuit breaker probing)" in examine(fleet, FIRST_PAUSE_S).why
    assert not examine(fleet, FIRST_PAUSE_S).serving
    fleet.outcomes.breakers.succeeded("d2", "probe", FIRST_PAUSE_S)
    assert examine(fleet, FIRST_PAUSE_S).status == "ok"
