from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.connector.ring import ALIGNMENT, StagingRing

SIZE = 16 * ALIGNMENT


@given(st.lists(st.one_of(st.none(), st.integers(1, SIZE)), max_size=60))
def test_what_is_taken_overlaps_nothing_that_is_still_held(steps: list[int | None]) -> None:
    ring = StagingRing(torch.zeros(SIZE, dtype=torch.uint8))
    held: list[torch.Tensor] = []
    for step in steps:
        if step is None:
            if held:
                ring.give_back()
                held.pop(0)
            continue
        taken = ring.take(step)
        if taken is not None:
            assert len(taken) == step
            assert (taken.data_ptr() - ring.memory.data_ptr()) % ALIGNMENT == 0
            taken.fill_(len(held) + 1)
            held.append(taken)
        for number, memory in enumerate(held):
            memory.fill_(number + 1)
        assert all((memory == number + 1).all() for number, memory in enumerate(held))


def test_an_empty_ring_gives_all_it_has() -> None:
    ring = StagingRing(torch.zeros(SIZE, dtype=torch.uint8))
    for _round in range(3):
        assert ring.take(SIZE) is not None
        assert ring.take(1) is None
        ring.give_back()


def test_more_than_it_has_is_never_given() -> None:
    assert StagingRing(torch.zeros(SIZE, dtype=torch.uint8)).take(SIZE + 1) is None


def test_room_at_the_start_is_used_while_the_end_is_held() -> None:
    ring = StagingRing(torch.zeros(SIZE, dtype=torch.uint8))
    assert ring.take(SIZE // 2) is not None
    assert ring.take(SIZE // 2) is not None
    ring.give_back()
    assert ring.take(SIZE // 2) is not None
    assert ring.take(1) is None
