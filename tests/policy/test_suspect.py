"""When a request is held to kill its workers."""

from __future__ import annotations

import pytest

from kvrelay.policy.suspect import MAX_DEATHS, Blame


@pytest.mark.parametrize(
    ("shares", "is_enough"),
    [
        ([], False),
        ([1.0], False),
        ([1.0, 1.0], True),
        ([1.0, 0.5], False),
        ([1.0, 0.5, 0.5], True),
        ([0.5] * 3, False),
        ([0.5] * 4, True),
        ([0.02] * (MAX_DEATHS - 1), False),
        ([0.02] * MAX_DEATHS, True),
    ],
    ids=str,
)
def test_the_fewer_others_died_with_its_workers_the_sooner_a_request_is_held_to_be_why(
    shares: list[float], is_enough: bool
) -> None:
    blame = Blame()
    for share in shares:
        blame = blame.another(share)
    assert blame.is_enough is is_enough
