"""What a request in flight waits for, as an operator sees it."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Rest
from kvrelay.fleet.request_status import RequestStatus
from kvrelay.policy.admit import Limits
from kvrelay.policy.loss import LossReason
from kvrelay.types import Role
from tests.fleet.known import ask, known_brain, member
from tests.fleet.values import begun, store


def split_brain(limits: Limits | None = None) -> Brain:
    """Of one P, which computes every prompt, and one D."""
    brain = Brain(dead_after_s=1e9, transfer_wait_s=120.0, local_prefill=False, limits=limits)
    brain.members.register_store(store(), 0.0)
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        brain.register_worker(member(name, role), 0.0)
    return brain


def request_status(brain: Brain, now: float, name: str = "r0", silent_since_s: float | None = None) -> RequestStatus:
    return brain.request_statuses.of(name, silent_since_s, now)


def known(told: dict[str, Any] | None) -> dict[str, Any]:
    assert told is not None
    return told


def test_a_request_whose_prompt_is_computed_waits_for_its_p() -> None:
    brain = split_brain()
    begun(brain, ask("r0", (7, 1000)))
    brain.prefill_sent("r0", 1.0)
    told = request_status(brain, 3.0)
    assert (told.waits_for, told.waits_s, told.begun) == ("prefill", 2.0, False)
    assert [(leg["worker"], leg["state"]) for leg in told.prefills] == [("p0", "sent")]


def test_one_that_d_owes_a_word_waits_for_it_and_not_for_ever() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    begun(brain, ask("r0", (7, 200)))
    worker = brain.decode_order("r0", 0.2).worker
    told = request_status(brain, 3.0, silent_since_s=1.0)
    assert (told.waits_for, told.waits_s) == ("decode", 2.0)
    assert told.given_up_s == pytest.approx(brain.silences.silence_s(worker, 3.0))
    assert (known(told.decode)["worker"], known(told.decode)["usable"]) == (worker, True)


def test_one_whose_client_reads_waits_for_nobody_here() -> None:
    brain = known_brain([], [("d0", "s1")])
    begun(brain, ask("r0", (7, 200)))
    brain.first_token("r0", 0.5)
    assert (request_status(brain, 1.0).waits_for, request_status(brain, 1.0).begun) == ("client", True)


def test_a_lost_answer_waits_for_its_turn() -> None:
    brain = known_brain([], [("d0", "s1"), ("d1", "s1")])
    for number in range(4):
        begun(brain, ask(f"r{number}", (number, 2000)))
        brain.first_token(f"r{number}", 0.5)
    for number in range(4):
        rest = Rest(ask=ask(f"r{number}", (40 + number, 2000)), tokens=1)
        brain.recovery.lost(f"r{number}", rest, reason=LossReason.RESET, now=1.0)
    told = request_status(brain, 1.5, "r3")
    assert (told.waits_for, told.waits_s, told.resumes) == ("pace", 0.5, 1)


def test_one_that_was_not_let_in_waits_at_the_door_with_a_deadline() -> None:
    brain = split_brain(Limits(queue_s=0.1, hold_s=5.0))
    number = 0
    while not brain.door.waiting and number < 20:
        brain.begin(ask(f"r{number}", (number, 2000)), 0.0)
        number += 1
    name = f"r{number - 1}"
    told = request_status(brain, 0.5, name)
    assert (told.waits_for, told.waits_s) == ("admission", 0.5)
    assert told.given_up_s is not None


def test_nothing_is_known_of_one_that_is_over() -> None:
    brain = known_brain([], [("d0", "s1")])
    assert request_status(brain, 1.0).waits_for == "client"
