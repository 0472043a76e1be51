"""Which copies are ordered, and that nothing stays counted of those that are over."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, PullPages
from kvrelay.fleet.ways import BREAKS_TO_OPEN
from kvrelay.fleet.workers import FORGET_S
from kvrelay.identity import root_of
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import PageName, PromptNames, RequestFacts, Role, Stage
from tests.fleet.values import begun, fingerprint, names, store, worker

PAGES = 20
NAMES: PromptNames = {PageName(root_of(fingerprint())): tuple(names(*range(1, PAGES + 1)))}
ROOMY = 1 << 30


@pytest.fixture
def brain() -> Brain:
    """A decode worker that writes, and its node's store holds all of its pages; another store is empty."""
    brain = Brain(dead_after_s=2.0, transfer_wait_s=9.0, replicate_share=0.5)
    for name in ("near", "far"):
        brain.members.register_store(msgspec.structs.replace(store(name), capacity_bytes=ROOMY), 0.0)
    brain.register_worker(worker("d", Role.BOTH, store="near"), 0.0)
    facts = RequestFacts(request_id="r", model="tiny", prompt_tokens=(80,), max_tokens=100, page_names=(NAMES,))
    begun(brain, Ask(facts=facts, received_s=0.0))
    brain.decode_order("r", 0.0)
    brain._holdings.store_has("near", next(iter(NAMES.values())), fingerprint().format)
    return brain


def look(brain: Brain, now: float = 1.0) -> list[PullPages]:
    return brain.copies.look("r", NAMES, PAGES * 4, now)


def test_pages_of_one_node_alone_go_to_another_and_are_known_there(brain: Brain) -> None:
    (order,) = look(brain)
    assert (order.store, len(order.order.names), order.order.push_to) == ("near", PAGES, store("far").address)
    assert look(brain) == [], "one copy of an answer at a time"
    brain.check_invariants()
    arrived = TransferEvent(store="far", transfer=order.order.transfer, stage=Stage.ARRIVED, bytes=100)
    brain.transfer_event(arrived, 1.1)
    assert (brain.copies.counts.made, brain.copies.counts.bytes, brain.milestones.unknown) == (1, 100, 0)
    assert look(brain, 2.0) == [], "another node has them now"
    brain.check_invariants()


def test_a_copy_that_fails_or_whose_store_goes_away_is_forgotten(brain: Brain) -> None:
    (order,) = look(brain)
    brain.transfer_event(TransferEvent(store="near", transfer=order.order.transfer, stage=Stage.FAILED), 1.1)
    (again,) = look(brain, 1.9)
    assert again.order.transfer != order.order.transfer
    brain.tick(9.0)
    assert brain.copies.counts.lost == 2
    brain.check_invariants()


def test_without_a_share_nothing_is_copied(brain: Brain) -> None:
    brain.copies._share = 0.0
    assert not brain.copies.is_on
    assert look(brain) == []


def test_few_new_pages_are_not_worth_a_message(brain: Brain) -> None:
    assert brain.copies.look("r", NAMES, 3 * 4, 1.0) == []
    assert brain.copies.look("unknown", NAMES, PAGES * 4, 1.0) == []


def test_what_was_spent_on_ways_of_stores_that_nobody_knows_any_more_is_forgotten(brain: Brain) -> None:
    look(brain)
    brain.tick(1.0)
    assert list(brain.copies._budgets) == [("near", "far")]
    brain.tick(FORGET_S + 2.0)
    brain.tick(FORGET_S + 3.0)
    assert brain.copies._budgets == {}


def test_nothing_is_copied_over_a_way_that_is_shut(brain: Brain) -> None:
    for number in range(BREAKS_TO_OPEN):
        brain.fleet.ways.sent(f"t{number}", ("near", "far"), 0.5)
        failed = TransferEvent(store="near", transfer=f"t{number}", stage=Stage.FAILED, unreachable=True)
        brain.transfer_event(failed, 0.5)
    assert look(brain) == []
    assert look(brain, 1.6) != [], "the probe"
