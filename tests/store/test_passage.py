"""What a sender counts of a push, with a clock made of numbers."""

from __future__ import annotations

from kvrelay.store.passage import Passage


def test_the_time_between_batches_is_no_time_of_moving() -> None:
    passage = Passage()
    for left, landed in ((10.0, 11.0), (20.0, 20.5)):
        passage.leave(left)
        passage.land(0, landed)
    assert passage.moving_s == 1.5


def test_batches_side_by_side_are_timed_once() -> None:
    passage = Passage()
    passage.leave(1.0)
    passage.leave(2.0)
    passage.land(1, 3.0)
    assert (passage.in_flight, passage.moving_s) == (1, 0.0)
    passage.land(2, 5.0)
    assert (passage.in_flight, passage.moving_s, passage.retries) == (0, 4.0, 3)


def test_what_the_peer_took_after_the_prefill_is_late() -> None:
    passage = Passage()
    passage.take(100)
    assert not passage.is_prefill_over
    passage.end_prefill()
    passage.take(5)
    assert (passage.is_prefill_over, passage.taken_bytes, passage.late_bytes) == (True, 105, 5)


def test_a_push_that_had_nothing_to_send_has_nothing_late() -> None:
    passage = Passage()
    passage.end_prefill()
    assert (passage.late_bytes, passage.moving_s) == (0, 0.0)
