"""Tests of deploy/cores.py."""

from __future__ import annotations

import pytest

from kvrelay.deploy import cores
from kvrelay.errors import Misconfigured


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0,2", (0, 2)), ("5,0-1", (5, 0, 1))]
)
def test_core_lists_are_read_as_people_write_them(text: str, expected: tuple[int, ...]) -> None:
    assert cores.parse(text) == expected


@pytest.mark.parametrize(("given", "text"), [((0,), "0"), ((3, 0, 1, 2), "0-3"), ((5, 0, 1), "0-1,5"), ((0, 2), "0,2")])
def test_cores_are_told_as_people_write_them(given: tuple[int, ...], text: str) -> None:
    assert cores.ranges(given) == text


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0;1"])
def test_a_bad_core_list_is_refused_by_its_setting(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"worker\.cpus"):
        cores.parse(text)


@pytest.mark.parametrize(
    ("have", "engines", "expected"),
    [
        (2, 2, [(0,), (1,)]),
        (2, 1, [(0, 1)]),
        (2, 3, [(0,), (1,), (0,)]),
        (4, 3, [(0,), (1,), (2,)]),
        (4, 4, [(0,), (1,), (2,), (3,)]),
        (9, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, 0, []),
    ],
)
def test_engines_get_equal_shares_and_no_core_twice_unless_there_are_too_few(
    have: int, engines: int, expected: list[tuple[int, ...]]
) -> None:
    assert cores.share(tuple(range(have)), engines) == expected
