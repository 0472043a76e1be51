"""What a stream in a recovery benchmark counts as."""

from __future__ import annotations

from benchmarks.breaking.bench import Stream
from benchmarks.breaking.stages import STAGES, spread


def test_a_pause_is_the_longest_time_between_two_tokens() -> None:
    assert Stream(tokens=[1, 2, 3], came_s=[1.0, 1.5, 3.0]).longest_pause_s == 1.5
    assert Stream().longest_pause_s == 0.0


def test_figures_say_their_worst() -> None:
    assert spread([0.3, 0.1, 0.2]) == {"median": 0.2, "worst": 0.3, "count": 3}


def test_every_stage_says_what_it_breaks() -> None:
    assert all(stage.__doc__ for stage in STAGES.values())
