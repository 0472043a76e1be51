"""How long steps take now."""

from __future__ import annotations

import pytest

from kvrelay.fleet.steps import FORGET_S, MAX_WORKERS, Steps


def test_gaps_of_streams_are_the_steps_of_their_worker_and_of_no_other() -> None:
    steps = Steps()
    steps.saw("d0", "i1", 0.0, 1.0)
    assert steps.seconds("d0", "i1", 1.0) == 0.0
    steps.saw("d0", "i1", 2.5, 1.0)
    assert (steps.seconds("d0", "i1", 1.0), steps.seconds("d1", "i1", 1.0)) == (2.5, 0.0)
    for _ in range(50):
        steps.saw("d0", "i1", 0.1, 1.0)
    assert steps.seconds("d0", "i1", 1.0) == pytest.approx(0.1, abs=0.05)


def test_steps_of_a_worker_that_was_restarted_are_forgotten() -> None:
    steps = Steps()
    steps.saw("d0", "i1", 2.5, 1.0)
    assert steps.seconds("d0", "i2", 1.0) == 0.0
    steps.saw("d0", "i2", 0.03, 1.0)
    assert steps.seconds("d0", "i2", 1.0) == 0.03


def test_steps_of_a_worker_that_has_written_nothing_since_are_forgotten() -> None:
    steps = Steps()
    steps.saw("d0", "i1", 1.0, 1.0)
    assert steps.seconds("d0", "i1", 1.0 + FORGET_S) == 1.0
    assert steps.seconds("d0", "i1", 1.5 + FORGET_S) == 0.0


def test_an_old_gap_does_not_make_newer_ones_old() -> None:
    steps = Steps()
    steps.saw("d0", "i1", 1.0, FORGET_S)
    steps.saw("d0", "i1", 1.0, 1.0)
    assert steps.seconds("d0", "i1", 2 * FORGET_S) == 1.0


def test_workers_that_come_and_go_do_not_add_up() -> None:
    steps = Steps()
    for number in range(MAX_WORKERS + 1):
        steps.saw(f"d{number}", "i1", 1.0, 1.0)
    assert repr(steps) == "<Steps of 1 workers>"
