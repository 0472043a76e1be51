"""Who gets in."""

from __future__ import annotations

import pytest

from kvrelay.policy.admit import Accepted, Turned, admit


@pytest.mark.parametrize(
    ("in_flight", "decoders", "enters"), [(0, 1, True), (9, 1, True), (10, 1, False), (0, 0, False)]
)
def test_a_request_enters_when_somebody_can_answer_and_there_is_room(
    in_flight: int, decoders: int, enters: bool
) -> None:
    verdict = admit(in_flight=in_flight, decoders=decoders, limit=10)
    assert isinstance(verdict, Accepted if enters else Turned)


def test_who_is_turned_away_is_told_when_to_come_back() -> None:
    verdict = admit(in_flight=0, decoders=0)
    assert isinstance(verdict, Turned)
    assert verdict.after_s > 0
    assert "/health" in verdict.reason
