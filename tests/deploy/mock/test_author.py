"""Tests of deploy/mock/author.py: what a mock answers follows from the prompt alone."""

from __future__ import annotations

import pytest

from kvrelay.deploy.mock.author import Author, advance, state_of
from tests.deploy.mock.values import AUTHOR, END

PROMPT = [7, 0, 3, 3, 9]


def test_a_state_grows_token_by_token_as_from_all_of_them() -> None:
    state = state_of(PROMPT)
    for count, token in enumerate([0, 5, 2**32 - 1], start=1):
        state = advance(state, token)
        assert state == state_of([*PROMPT, *[0, 5, 2**32 - 1][:count]])


@pytest.mark.parametrize("other", [[0, *PROMPT], [*PROMPT, 0], PROMPT[::-1], [7, 0, 3, 9, 3], [7, 1, 3, 3, 9]])
def test_other_prompts_have_other_states_and_answers(other: list[int]) -> None:
    assert state_of(other) != state_of(PROMPT)
    assert AUTHOR.answer(other, 8) != AUTHOR.answer(PROMPT, 8)


def test_prompts_of_any_length_have_states() -> None:
    long = list(range(40_000))
    assert state_of(long) == advance(state_of(long[:-1]), long[-1])


def test_an_answer_goes_on_elsewhere_as_it_would_have_here() -> None:
    whole = AUTHOR.answer(PROMPT, 20)
    assert AUTHOR.answer(PROMPT + whole[:7], 13) == whole[7:]


def test_choices_of_one_prompt_differ_and_the_first_is_the_plain_answer() -> None:
    answers = [AUTHOR.answer(PROMPT, 8, choice=choice) for choice in range(3)]
    assert answers[0] == AUTHOR.answer(PROMPT, 8)
    assert len(set(map(tuple, answers))) == 3


def test_answers_end_where_they_may_about_as_often_as_was_said() -> None:
    author = Author(range(10, 60), END, mean_tokens=20)
    ends = sum(author.is_end(author.next(state_of([number]), may_end=True)) for number in range(4000))
    assert 150 < ends < 250
    assert not any(author.is_end(author.next(state_of([number]), may_end=False)) for number in range(4000))
