"""When a request is held to kill its workers."""

from __future__ import annotations

import pytest

from kvrelay.policy.crash_history import MAX_DEATHS, MAX_LOSSES, CrashHistory


@pytest.mark.parametrize(
    ("shares", "is_poison"),
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
    shares: list[float], is_poison: bool
) -> None:
    crashes = CrashHistory()
    for share in shares:
        crashes = crashes.with_crash(share)
    assert crashes.is_poison is is_poison


@pytest.mark.parametrize(
    ("soon", "late", "is_poison"), [(1, 1, False), (0, MAX_LOSSES - 1, False), (1, MAX_LOSSES - 1, True)]
)
def test_workers_that_had_it_for_long_are_held_against_it_when_they_are_many(
    soon: int, late: int, is_poison: bool
) -> None:
    crashes = CrashHistory()
    for _ in range(soon):
        crashes = crashes.with_crash(1.0)
    for _ in range(late):
        crashes = crashes.with_late_loss()
    assert crashes.is_poison is is_poison
