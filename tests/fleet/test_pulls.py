"""A prefix that only another node has is pulled over when that is cheaper than to compute it or to queue beside it."""

from __future__ import annotations

import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import DispatchDecode, PullPages, SendPrefill
from kvrelay.fleet.holds import Ending
from kvrelay.fleet.pulls import COOL_S
from kvrelay.policy.cost import Kind
from kvrelay.policy.patience import held_until_s
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import Stage, Transport
from tests.fleet.known import PAGE, Told, ask, known_brain, prompt_names
from tests.fleet.test_prefix_waits import waits
from tests.fleet.values import begun, fingerprint, store

OLD = (7, 2000)
FAR = store("s2", "127.0.0.1:9002")
BUSY = "busy-0.0-1"
"""The request that keeps p2 busy from the start; the one before it went to p1."""
BYTES = OLD[1] // PAGE * fingerprint().format.page_bytes


def two_nodes(prefills: tuple[tuple[str, str], ...] = (("p1", "s1"), ("p2", "s2"))) -> Brain:
    """The store of the second node has the prefix; no engine has it any more.

    Prompts are computed strictly in order: elsewhere one whose prefix is there would not queue behind a long one.
    """
    brain = known_brain(prefills, shares=False)
    Told(brain).has(FAR, prompt_names(OLD), 0.0)
    return brain


def busy(brain: Brain, worker: str, now: float = 0.0) -> None:
    """``worker`` gets a second and a half to compute, and the others nothing."""
    for number in range(8):
        name = f"busy-{now}-{number}"
        plan = begun(brain, ask(name, (1000 + int(now * 100) + number, 1500), now=now), now)
        brain.prefill_sent(name, now)
        if plan.prefills[0].worker != worker:
            brain.finish(name, status=499, output_tokens=0, now=now)
        else:
            return
    raise AssertionError(f"nothing was sent to {worker}")


def moving(brain: Brain) -> int:
    """Bytes of open pulls; ``check_invariants`` compares them with what is on the way between the stores."""
    return sum(size_bytes for _, size_bytes in brain.prefixes.pulls.moving())


def says(transfer: str, stage: Stage, at: str, *, bytes: int = 0) -> TransferEvent:
    return TransferEvent(store=at, transfer=transfer, stage=stage, transport=Transport.TCP, bytes=bytes)


def pulled() -> tuple[Brain, PullPages]:
    """A request for whose prefix a pull was begun."""
    brain = two_nodes()
    busy(brain, "p2")
    plan = begun(brain, ask("r1", OLD, (9, 40)))
    assert plan.path is Path.REMOTE_PREFILL
    assert plan.prefills == ()
    (pull,) = plan.pulls
    return brain, pull


def at_rest(brain: Brain, *names: str, now: float = 9.0) -> None:
    for name in names:
        brain.finish(name, status=200, output_tokens=1, now=now)
    brain.admit_waiting(now)
    brain.check_invariants()
    assert len(brain.prefixes.holds) == 0
    assert moving(brain) == 0


def test_the_holder_itself_is_best_as_long_as_it_is_idle() -> None:
    brain = two_nodes()
    plan = begun(brain, ask("r1", OLD, (9, 40)))
    assert [order.worker for order in plan.prefills] == ["p2"]
    assert brain.ledger.get("r1").predicted.source.kind is Kind.STORE  # type: ignore[union-attr]


def test_a_prefix_of_a_busy_node_is_pulled_to_an_idle_one_and_the_prompt_follows_it() -> None:
    brain, pull = pulled()
    assert (pull.store, pull.order.push_to) == ("s2", "127.0.0.1:9001")
    assert tuple(pull.order.names) == prompt_names(OLD)
    assert (pull.order.total_tokens, pull.order.format) == (2000, fingerprint().format)
    assert moving(brain) == BYTES
    brain.check_invariants()
    assert brain.transfer_event(says(pull.order.transfer, Stage.SENT, "s2"), 0.04) == []
    (command,) = brain.transfer_event(says(pull.order.transfer, Stage.ARRIVED, "s1", bytes=BYTES), 0.05)
    assert isinstance(command, SendPrefill)
    assert command.order.worker == "p1"
    (wait,) = waits(brain, "r1")
    assert (wait["source"], wait["origin"], wait["tokens"]) == ("peer", "s2", 2000)
    assert (wait["waited_s"], wait["ending"]) == (0.05, "came")
    # It is known to be there before the store itself reports it.
    again = begun(brain, ask("r2", OLD, (8, 40)), 0.1)
    assert [order.worker for order in again.prefills] == ["p1"]
    assert (brain.prefixes.pulls.endings, brain.milestones.unknown) == ({Ending.CAME: 1}, 0)
    at_rest(brain, "r1", "r2")


def test_what_pulls_take_is_learned() -> None:
    brain, pull = pulled()
    before = brain.loads.links.move("s2", "s1").seconds(BYTES)
    brain.transfer_event(says(pull.order.transfer, Stage.ARRIVED, "s1", bytes=BYTES), 0.8)
    assert brain.loads.links.move("s2", "s1").seconds(BYTES) > 2 * before


def test_others_wait_for_a_pull_that_is_under_way_instead_of_asking_for_another() -> None:
    brain, pull = pulled()
    plan = begun(brain, ask("r2", OLD, (8, 40)))
    assert (plan.prefills, plan.pulls) == ((), ())
    assert waits(brain, "r2")[0]["origin"] == pull.order.transfer
    commands = brain.transfer_event(says(pull.order.transfer, Stage.ARRIVED, "s1", bytes=BYTES), 0.05)
    assert [command.request_id for command in commands if isinstance(command, SendPrefill)] == ["r1", "r2"]
    at_rest(brain, "r1", "r2")


def test_what_the_node_has_already_does_not_count_as_bytes_to_move() -> None:
    brain = two_nodes()
    Told(brain).has(store(), prompt_names(OLD)[:400], 0.0)
    busy(brain, "p2")
    begun(brain, ask("r1", OLD, (9, 40)))
    assert moving(brain) == BYTES - 400 * fingerprint().format.page_bytes
    brain.tick(60.0)
    at_rest(brain, "r1", now=60.0)


@pytest.mark.parametrize("at", ["s1", "s2"])
def test_a_pull_that_fails_is_computed_instead_and_its_way_is_left_alone_for_a_while(at: str) -> None:
    brain, pull = pulled()
    (command,) = brain.transfer_event(says(pull.order.transfer, Stage.FAILED, at), 0.05)
    assert isinstance(command, SendPrefill)
    assert command.order.worker == "p2"  # beside the prefix: to queue there takes less than to compute it
    assert moving(brain) == 0
    assert [wait["ending"] for wait in waits(brain, "r1")] == ["lost"]
    brain.finish("r1", status=200, output_tokens=1, now=0.1)
    for now, pulls in ((0.1, 0), (COOL_S + 0.1, 1)):
        if now > COOL_S:
            brain.prefill_finished(BUSY, 0, 0, 1.5)
            busy(brain, "p2", now)
        plan = begun(brain, ask(f"at {now}", OLD, (9, 40), now=now), now)
        assert len(plan.pulls) == pulls
        brain.finish(f"at {now}", status=499, output_tokens=0, now=now)
    brain.tick(60.0)
    at_rest(brain)


def test_a_store_that_never_answers_costs_the_predicted_time_and_a_margin() -> None:
    brain, pull = pulled()
    predicted_s = float(waits(brain, "r1")[0]["predicted_s"])  # type: ignore[arg-type]
    assert brain.tick(held_until_s(0.0, predicted_s) - 0.01) == []
    (command,) = brain.tick(held_until_s(0.0, predicted_s) + 0.01)
    assert isinstance(command, SendPrefill)
    assert [wait["ending"] for wait in waits(brain, "r1")] == ["late"]
    assert (moving(brain), len(brain.prefixes.pulls)) == (0, 0)
    # What comes of it after all changes nothing.
    assert brain.transfer_event(says(pull.order.transfer, Stage.ARRIVED, "s1", bytes=BYTES), 2.0) == []
    assert brain.milestones.unknown == 0
    at_rest(brain, "r1")


def test_a_pull_whose_request_is_over_goes_on_for_those_who_wait_with_it() -> None:
    brain, pull = pulled()
    begun(brain, ask("r2", OLD, (8, 40)))
    brain.finish("r1", status=499, output_tokens=0, now=0.01)
    assert brain.admit_waiting(0.01) == []
    (command,) = brain.transfer_event(says(pull.order.transfer, Stage.ARRIVED, "s1", bytes=BYTES), 0.05)
    assert command.request_id == "r2"
    at_rest(brain, "r2")


def test_d_computes_a_prompt_itself_beside_a_prefix_that_was_pulled_to_its_node() -> None:
    brain = known_brain([], [("d0", "s1")])
    brain.members.register_store(FAR, 0.0)
    Told(brain).has(FAR, prompt_names(OLD), 0.0)
    plan = begun(brain, ask("r1", OLD, (9, 40)))
    assert (plan.path, plan.held, len(plan.pulls)) == (Path.LOCAL, True, 1)
    told = brain.transfer_event(says(plan.pulls[0].order.transfer, Stage.ARRIVED, "s1", bytes=BYTES), 0.05)
    assert told == [DispatchDecode(request_id="r1")]
    brain.decode_order("r1", 0.05)
    at_rest(brain, "r1")


def test_a_short_prefix_is_computed_rather_than_pulled() -> None:
    brain = known_brain([("p1", "s1")])
    brain.members.register_store(FAR, 0.0)
    Told(brain).has(FAR, prompt_names((7, 8)), 0.0)
    assert begun(brain, ask("r1", (7, 8), (9, 40))).pulls == ()


def test_a_prefix_is_not_pulled_from_a_store_that_is_away() -> None:
    brain = two_nodes((("p1", "s1"),))
    brain.fleet.stores.leave("s2", "i1")
    assert begun(brain, ask("r1", OLD, (9, 40))).pulls == ()


def test_a_pull_from_a_store_that_is_gone_is_given_up_at_the_next_tick() -> None:
    brain, pull = pulled()
    brain.members.link(FAR, 1)
    assert brain.tick(0.0) == []
    brain.members.link(FAR, -1)
    (again,) = brain.tick(0.0)
    assert isinstance(again, SendPrefill)
    assert (again.request_id, waits(brain, "r1")[0]["ending"]) == ("r1", Ending.LOST)
    assert brain.transfer_event(says(pull.order.transfer, Stage.ARRIVED, "s1"), 0.1) == []
    at_rest(brain, "r1")


def test_nothing_is_pulled_to_a_store_that_is_gone() -> None:
    brain = known_brain([], [("d0", "s1")])
    brain.members.register_store(FAR, 0.0)
    Told(brain).has(FAR, prompt_names(OLD), 0.0)
    assert begun(brain, ask("r1", OLD, (9, 40))).pulls
    brain.finish("r1", status=200, output_tokens=1, now=0.1)
    brain.tick(COOL_S + 9.0)
    brain.members.leave(store("s1"))
    plan = begun(brain, ask("r2", OLD, (9, 40)), COOL_S + 9.0)
    assert (plan.pulls, plan.held) == ((), False)


def test_who_waits_for_a_pull_goes_on_as_soon_as_its_target_is_gone() -> None:
    brain, _ = pulled()
    brain.members.leave(store("s1"))
    assert [type(command) for command in brain.tick(0.1)] == [DispatchDecode], "without its store D gets no pages"
    assert waits(brain, "r1")[0]["ending"] == "lost"
    brain.check_invariants()
