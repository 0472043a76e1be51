"""What can go on elsewhere, when silence is a loss, and how fast prompts are computed again."""

from __future__ import annotations

import pytest

from kvrelay.policy.recover import PER_OUTPUT, SURVIVES, Manner, Pace, manner, patience


@pytest.mark.parametrize(
    ("fields", "replays", "expected"),
    [
        ((), False, Manner.CONTINUE),
        (("prompt", "temperature", "top_p", "logit_bias", "stop", "max_tokens"), False, Manner.CONTINUE),
        (("messages", "repetition_penalty", "logprobs", "top_logprobs", "n"), False, Manner.CONTINUE),
        (("prompt", "seed"), False, Manner.FAIL),
        (("prompt", "seed"), True, Manner.REPLAY),
        (("messages", "response_format", "presence_penalty"), True, Manner.REPLAY),
        (("messages", "tools", "tool_choice"), True, Manner.REPLAY),
        (("prompt", "a_field_of_next_year"), True, Manner.FAIL),
        (("prompt", "echo"), True, Manner.FAIL),
    ],
)
def test_a_request_goes_on_as_its_fields_allow(fields: tuple[str, ...], replays: bool, expected: Manner) -> None:
    assert manner(fields, replays=replays) is expected


def test_no_field_is_on_both_lists() -> None:
    assert not SURVIVES & PER_OUTPUT


@pytest.mark.parametrize(
    ("silent_s", "worker_silent_s", "step_s", "lost"),
    [
        (1.4, 9.0, 0.01, False),
        (1.6, 1.1, 0.01, True),
        (1.6, 0.9, 0.01, False),
        (9.0, 0.9, 0.01, False),
        (1.6, 1.1, 0.3, False),
        (2.5, 1.1, 0.3, True),
    ],
)
def test_a_stream_is_lost_when_it_and_its_worker_are_silent(
    silent_s: float, worker_silent_s: float, step_s: float, lost: bool
) -> None:
    assert patience(2.0).is_over(silent_s, worker_silent_s, step_s) is lost


def test_after_a_death_prompts_are_computed_again_at_half_of_the_workers_time() -> None:
    pace, begun = Pace(), 0
    for tenth in range(100):
        now = tenth / 10
        while pace.allows(now, workers=2):
            pace = pace.spend(0.25, now, workers=2)
            begun += 1
    # Two seconds at once, and one second in each of ten.
    assert begun == pytest.approx((2 + 9.9) / 0.25, abs=2)


def test_a_prompt_longer_than_the_burst_begins_when_nothing_was_spent_before() -> None:
    pace = Pace()
    assert pace.allows(0.0, workers=1)
    pace = pace.spend(30.0, 0.0, workers=1)
    assert not pace.allows(57.9, workers=1)
    assert pace.allows(58.1, workers=1)
