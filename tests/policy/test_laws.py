"""One law of many workers, as numbers and as arrays."""

from __future__ import annotations

import pytest

from kvrelay.policy.laws import MANY, Laws


def laws(count: int, start_s: float = 0.01) -> Laws:
    return Laws([(start_s * (1 + at % 3), 1e-4 * at, 1e-9) for at in range(count)])


def rows(of: Laws) -> list[tuple[float, ...]]:
    return list(zip(*(column.tolist() for column in of.columns), strict=True))


@pytest.mark.parametrize("count", [0, 1, MANY - 1, MANY, 40])
def test_beside_others_the_start_is_what_they_lack_in_numbers_as_in_arrays(count: int) -> None:
    own, others = laws(count), Laws([(0.02, 0.0, 0.0)] * count)
    beside = own.beside(others)
    assert len(beside) == count
    assert list(beside) == [(max(0.0, start - 0.02), *more) for start, *more in own]
    assert rows(beside) == list(beside)
    assert beside.starts() == [start for start, *_ in beside]


def test_of_many_the_arrays_of_a_choice_are_those_that_are_kept() -> None:
    own, others = laws(MANY), laws(MANY, 0.005)
    for _ in range(2):
        beside = own.beside(others)
        assert beside.columns[1] is own.columns[1]
    own.write(3, (1.0, 2.0, 3.0))
    assert own.beside(others)[3] == (1.0 - others[3][0], 2.0, 3.0)
