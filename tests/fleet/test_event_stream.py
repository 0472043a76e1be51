"""Which events of a holder may pass."""

from __future__ import annotations

import pytest

from kvrelay.fleet.event_stream import REPAIR_S, EventStream, State, Step
from kvrelay.protocol.feed import PageEvents, PageSnapshot, PagesWanted
from kvrelay.types import Medium

APPLY, RESTART, IGNORE, FORGET = Step.APPLY, Step.RESTART, Step.IGNORE, Step.FORGET


def event(sequence: int) -> PageEvents:
    return PageEvents(incarnation="i1", sequence=sequence, changes=[])


def part(number: int, *, last: bool, sequence: int = 10) -> PageSnapshot:
    return PageSnapshot(incarnation="i1", sequence=sequence, part=number, last=last, medium=Medium.HBM, names=[])


def following(sequence: int = 10) -> EventStream:
    stream = EventStream()
    stream.snapshot(part(0, last=True, sequence=sequence))
    return stream


@pytest.mark.parametrize(
    ("sequences", "steps", "state"),
    [
        ([11, 12, 13], [APPLY, APPLY, APPLY], State.FOLLOWING),
        ([11, 12, 14], [APPLY, APPLY, IGNORE], State.GAP),
        ([12, 13, 11, 12], [IGNORE, IGNORE, APPLY, APPLY], State.FOLLOWING),
        ([11, 11, 10, 1, 12], [APPLY, IGNORE, IGNORE, IGNORE, APPLY], State.FOLLOWING),
        ([11, 13, 13, 12, 12, 13], [APPLY, IGNORE, IGNORE, APPLY, IGNORE, APPLY], State.FOLLOWING),
    ],
)
def test_an_event_passes_only_after_the_one_before_it(sequences: list[int], steps: list[Step], state: State) -> None:
    stream = following()
    assert [stream.events(event(sequence), 0.0) for sequence in sequences] == steps
    assert stream.state is state


def test_events_before_a_snapshot_mean_nothing_and_it_is_asked_for() -> None:
    stream = EventStream()
    assert [stream.events(event(number), 0.0) for number in (1, 2)] == [IGNORE, IGNORE]
    assert stream.wanted(0.0) == PagesWanted(after=-1)
    assert stream.wanted(0.1) is None, "it was asked already"
    assert stream.wanted(REPAIR_S + 0.1) == PagesWanted(after=-1)
    assert not stream.is_heard


def test_a_gap_is_asked_about_at_its_first_event_from_the_last_good_one_on() -> None:
    stream = following()
    assert stream.wanted(5.0) is None
    stream.events(event(13), 5.0)
    assert stream.wanted(5.0) == PagesWanted(after=10)
    stream.events(event(14), 5.1)
    assert stream.wanted(5.1) is None
    assert stream.wanted(5.0 + REPAIR_S) == PagesWanted(after=10), "it is asked again as long as the gap is open"
    assert not stream.is_lost(5.0 + REPAIR_S)
    assert stream.is_lost(5.1 + REPAIR_S)


def test_a_snapshot_restarts_and_its_parts_come_in_order() -> None:
    stream = following(3)
    steps = [stream.snapshot(part(number, last=number == 2)) for number in range(3)]
    assert steps == [RESTART, APPLY, APPLY]
    assert (stream.state, stream.sequence) == (State.FOLLOWING, 10)
    assert stream.events(event(11), 0.0) is APPLY


@pytest.mark.parametrize("wrong", [part(2, last=True), part(1, last=False, sequence=11)])
def test_parts_that_do_not_fit_make_it_begin_anew(wrong: PageSnapshot) -> None:
    stream = EventStream()
    stream.snapshot(part(0, last=False))
    assert stream.snapshot(wrong) is FORGET
    assert stream.wanted(9.0) == PagesWanted(after=-1)


def test_a_part_without_a_beginning_makes_it_begin_anew() -> None:
    assert following().snapshot(part(1, last=True)) is FORGET


def test_events_in_the_middle_of_a_snapshot_are_not_applied() -> None:
    stream = EventStream()
    stream.snapshot(part(0, last=False))
    assert stream.events(event(11), 0.0) is IGNORE
    assert stream.snapshot(part(1, last=True)) is APPLY


def test_over_a_new_link_it_goes_on_where_it_was_or_begins_a_broken_off_snapshot_anew() -> None:
    assert following().relinked(0.0) == PagesWanted(after=10)
    half = EventStream()
    half.snapshot(part(0, last=False))
    assert half.relinked(0.0) == PagesWanted(after=-1)
