"""How long steps take now."""

from __future__ import annotations

import pytest

from kvrelay.fleet.steps import MAX_WORKERS, Steps


def test_gaps_of_streams_are_the_steps_of_their_worker_and_of_no_other() -> None:
    steps = Steps()
    steps.saw("d0", 0.0)
    assert steps.seconds("d0") == 0.0
    steps.saw("d0", 2.5)
    assert (steps.seconds("d0"), steps.seconds("d1")) == (2.5, 0.0)
    for _ in range(50):
        steps.saw("d0", 0.1)
    assert steps.seconds("d0") == pytest.approx(0.1, abs=0.05)


def test_workers_that_come_and_go_do_not_add_up() -> None:
    steps = Steps()
    for number in range(MAX_WORKERS + 1):
        steps.saw(f"d{number}", 1.0)
    assert repr(steps) == "<Steps of 1 workers>"
