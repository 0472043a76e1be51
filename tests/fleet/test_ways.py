"""Ways from one store to another that let nothing through: they are avoided, probed, told, and used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.health import examine
from kvrelay.fleet.ways import BREAKS_TO_OPEN, MAX_UNDER_WAY, PROBE_S, UNTRIED_S, Ways
from kvrelay.policy.breaker import FIRST_PAUSE_S
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage
from tests.fleet.known import Told, ask, known_brain, prompt_names
from tests.fleet.values import begun, store

WAY = ("s1", "s2")


def says(transfer: str, stage: Stage, *, by: str = "s1", unreachable: bool = False) -> TransferEvent:
    return TransferEvent(store=by, transfer=transfer, stage=stage, reason="no answer", unreachable=unreachable)


def fail(ways: Ways, count: int = BREAKS_TO_OPEN, now: float = 0.0) -> None:
    for number in range(count):
        ways.sent(f"t{now}/{number}", WAY, now)
        ways.heard(says(f"t{now}/{number}", Stage.FAILED, unreachable=True), now)


def test_a_way_is_shut_after_some_failures_in_a_row_and_no_other_with_it() -> None:
    ways = Ways()
    fail(ways, BREAKS_TO_OPEN - 1)
    assert (ways.allows(WAY, 0.0), len(ways)) == (True, 0)
    fail(ways, 1, now=0.5)
    assert (ways.allows(WAY, 0.5), ways.allows(("s2", "s1"), 0.5), ways.shut(0.5)) == (False, True, frozenset({WAY}))
    assert [(row.source, row.target, row.why) for row in ways.broken()] == [("s1", "s2", "no answer")]


@pytest.mark.parametrize(("stage", "by"), [(Stage.ARRIVED, "s2"), (Stage.SENT, "s1")])
def test_pages_that_got_through_clear_it(stage: Stage, by: str) -> None:
    ways = Ways()
    fail(ways, BREAKS_TO_OPEN - 1)
    ways.sent("good", WAY, 1.0)
    ways.heard(says("good", stage, by=by), 1.0)
    fail(ways, BREAKS_TO_OPEN - 1, now=2.0)
    assert ways.allows(WAY, 2.0)


def test_failures_that_are_not_the_ways_are_not_counted() -> None:
    ways = Ways()
    for number in range(3 * BREAKS_TO_OPEN):
        ways.sent(f"full{number}", WAY, 0.0)
        ways.heard(says(f"full{number}", Stage.FAILED, by="s2"), 0.0)
    assert ways.allows(WAY, 0.0)


def test_both_stores_may_tell_of_a_failure_and_it_counts_once() -> None:
    ways = Ways()
    for number in range(BREAKS_TO_OPEN - 1):
        ways.sent(f"t{number}", WAY, 0.0)
        ways.heard(says(f"t{number}", Stage.FAILED, by="s2"), 0.0)
        for _ in range(2):
            ways.heard(says(f"t{number}", Stage.FAILED, unreachable=True), 0.0)
    assert ways.allows(WAY, 0.0)
    fail(ways, 1, now=1.0)
    assert not ways.allows(WAY, 1.0)


def break_link(ways: Ways, pushes: int, sent_s: float, now: float) -> None:
    """All that were under way over one link fail with it."""
    for number in range(pushes):
        ways.sent(f"push{sent_s}/{number}", WAY, sent_s)
    for number in range(pushes):
        ways.heard(says(f"push{sent_s}/{number}", Stage.FAILED, unreachable=True), now)


def test_a_link_that_breaks_with_many_pushes_is_one_failure() -> None:
    ways = Ways()
    for number in range(BREAKS_TO_OPEN - 1):
        break_link(ways, 20, sent_s=float(number), now=number + 0.5)
    assert ways.allows(WAY, 10.0)
    break_link(ways, 20, sent_s=10.0, now=10.5)
    assert not ways.allows(WAY, 10.5)


def test_late_failures_of_the_same_break_do_not_prolong_the_pause() -> None:
    ways = Ways()
    for number in range(30):
        ways.sent(f"early{number}", WAY, 0.0)
    fail(ways, now=0.5)
    for number in range(30):
        ways.heard(says(f"early{number}", Stage.FAILED, unreachable=True), 1.0)
    assert ways.allows(WAY, 0.5 + FIRST_PAUSE_S)


def test_failures_of_a_former_life_do_not_count_against_a_store_that_started_again() -> None:
    ways = Ways()
    for number in range(3 * BREAKS_TO_OPEN):
        ways.sent(f"old{number}", WAY, 0.0)
    ways.forget("s2")
    for number in range(3 * BREAKS_TO_OPEN):
        ways.heard(says(f"old{number}", Stage.FAILED, unreachable=True), 0.0)
    assert (ways.allows(WAY, 0.0), ways.broken()) == (True, [])


def test_what_is_shut_is_the_same_value_until_a_probe_is_due_or_something_changes() -> None:
    ways = Ways()
    fail(ways)
    shut = ways.shut(0.1)
    assert ways.shut(0.9 * FIRST_PAUSE_S) is shut
    ways.sent("elsewhere", ("s3", "s4"), 0.9 * FIRST_PAUSE_S)
    ways.heard(says("elsewhere", Stage.FAILED, unreachable=True), 0.9 * FIRST_PAUSE_S)
    assert ways.shut(0.9 * FIRST_PAUSE_S) is shut
    assert ways.shut(FIRST_PAUSE_S) == frozenset()
    ways.sent("probe", WAY, FIRST_PAUSE_S)
    assert ways.shut(FIRST_PAUSE_S) == {WAY}
    ways.heard(says("probe", Stage.SENT), 1.5 * FIRST_PAUSE_S)
    assert ways.shut(1.5 * FIRST_PAUSE_S) == frozenset()


def test_one_probe_goes_after_a_pause_and_its_failure_doubles_that() -> None:
    ways = Ways()
    fail(ways)
    due_s = FIRST_PAUSE_S
    assert (ways.allows(WAY, 0.99 * due_s), ways.allows(WAY, due_s)) == (False, True)
    ways.sent("probe", WAY, due_s)
    assert not ways.allows(WAY, due_s)
    assert ways.is_broken(WAY)
    ways.heard(says("probe", Stage.FAILED, unreachable=True), due_s)
    assert (ways.allows(WAY, 2 * due_s), ways.allows(WAY, due_s + 2 * FIRST_PAUSE_S)) == (False, True)


def test_a_probe_that_is_heard_of_no_more_does_not_keep_the_way_shut() -> None:
    ways = Ways()
    fail(ways)
    ways.sent("probe", WAY, 1.0)
    ways.expire(1.0 + PROBE_S)
    assert not ways.allows(WAY, 1.0 + PROBE_S)
    ways.expire(1.5 + PROBE_S)
    assert ways.allows(WAY, 1.5 + PROBE_S)


@pytest.mark.parametrize(
    "forget",
    [
        lambda ways: ways.expire(1.0 + UNTRIED_S),
        lambda ways: ways.forget("s2"),
        lambda ways: ways.keep_only(["s1"]),
    ],
    ids=["untried", "restarted", "unknown"],
)
def test_what_nobody_tried_for_long_a_restart_and_unknown_stores_are_forgotten(forget: Callable[[Ways], None]) -> None:
    ways = Ways()
    fail(ways)
    ways.expire(UNTRIED_S)
    ways.forget("s3")
    ways.keep_only(["s1", "s2"])
    assert len(ways) == 1
    forget(ways)
    assert (len(ways), ways.shut(0.0)) == (0, frozenset())


def test_transfers_that_nobody_ends_are_forgotten_and_a_store_is_no_way_to_itself() -> None:
    ways = Ways()
    for number in range(MAX_UNDER_WAY + BREAKS_TO_OPEN):
        ways.sent(f"t{number}", WAY, 0.0)
        ways.sent(f"own{number}", ("s1", "s1"), 0.0)
    for number in range(BREAKS_TO_OPEN):
        ways.heard(says(f"t{number}", Stage.FAILED, unreachable=True), 0.0)
        ways.heard(says(f"own{number}", Stage.FAILED, unreachable=True), 0.0)
    assert (len(ways), ways.shut(0.0)) == (0, frozenset())


# ---------------------------------------------------------------- in a fleet


def part(brain: Brain, now: float = 0.0) -> None:
    """Hand-offs over s1 > s2 fail until none is tried."""
    for number in range(BREAKS_TO_OPEN):
        name = f"lost{now}/{number}"
        plan = begun(brain, ask(name, (number + 1, 300), now=now), now)
        assert plan.path is Path.REMOTE_PREFILL
        for order in plan.prefills:
            brain.transfer_event(says(order.transfer, Stage.FAILED, unreachable=True), now)
        brain.finish(name, status=200, output_tokens=8, now=now)


def test_a_pair_that_is_cut_off_computes_where_it_answers_but_for_a_probe_now_and_then() -> None:
    brain = known_brain([("p0", "s1")], [("d0", "s2")])
    part(brain)
    for number in range(3):
        plan = begun(brain, ask(f"r{number}", (90 + number, 300)), 0.5)
        assert (plan.path, plan.local_reason) == (Path.LOCAL, "no_pair")
    probe = begun(brain, ask("probe", (97, 300), now=FIRST_PAUSE_S), FIRST_PAUSE_S)
    assert probe.path is Path.REMOTE_PREFILL
    assert begun(brain, ask("other", (98, 300), now=FIRST_PAUSE_S), FIRST_PAUSE_S).path is Path.LOCAL
    brain.transfer_event(says(probe.prefills[0].transfer, Stage.ARRIVED, by="s2"), 2.0)
    assert begun(brain, ask("well", (99, 300), now=2.0), 2.0).path is Path.REMOTE_PREFILL
    brain.check_invariants()


def test_another_pair_is_taken_where_there_is_one() -> None:
    brain = known_brain([("p0", "s1"), ("p1", "s3")], [("d0", "s2")])
    for number in range(BREAKS_TO_OPEN):
        brain.fleet.ways.sent(f"t{number}", WAY, 0.0)
        brain.fleet.ways.heard(says(f"t{number}", Stage.FAILED, unreachable=True), 0.0)
    for number in range(4):
        assert begun(brain, ask(f"r{number}", (number + 1, 300)), 0.5).prefills[0].worker == "p1"


def test_a_failure_that_is_told_after_its_request_counts() -> None:
    brain = known_brain([("p0", "s1")], [("d0", "s2")])
    for now in range(BREAKS_TO_OPEN):
        transfer = begun(brain, ask(f"r{now}", (now + 1, 300), now=now), now).prefills[0].transfer
        brain.finish(f"r{now}", status=200, output_tokens=8, now=now + 0.1)
        brain.transfer_event(says(transfer, Stage.FAILED, unreachable=True), now + 0.2)
    assert not brain.fleet.ways.allows(WAY, BREAKS_TO_OPEN - 0.8)


def test_nothing_is_pulled_over_a_way_that_is_shut() -> None:
    brain = known_brain([("p0", "s2")], [("d0", "s2")])
    source = store("s1", "127.0.0.1:9009")
    brain.members.register_store(source, 0.0)
    Told(brain).has(source, prompt_names((5, 2000)), 0.0)
    assert begun(brain, ask("r0", (5, 2000)), 0.0).pulls
    fail(brain.fleet.ways, now=10.0)
    assert not begun(brain, ask("r1", (5, 2000), now=10.5), 10.5).pulls


def test_health_names_the_way_and_the_workers_that_it_cuts_off() -> None:
    brain = known_brain([("p0", "s1"), ("p1", "s2")], [("d0", "s2")])
    assert examine(brain, 0.0).broken_ways == []
    fail(brain.fleet.ways)
    for now in (0.5, 1.5):  # when a probe is due, too
        health = examine(brain, now)
        assert (health.status, health.serving) == ("degraded", True)
        assert "from store 's1' to store 's2' fail (no answer)" in health.why
        assert [(row["source"], row["target"]) for row in health.broken_ways] == [WAY]
        assert [row["name"] for row in health.workers if row["cut_off"]] == ["p0"]
    brain.members.register_store(store("s2", "127.0.0.1:9002", incarnation="i2"), 2.0)
    assert examine(brain, 2.0).broken_ways == []
