"""Batches are as large as a link can carry soon, and no larger."""

from __future__ import annotations

import pytest

from kvrelay.store.batch_size import LEAST_BYTES, LONGEST_TURN_S, BatchSize

MOST = 8 << 20
SIDE_BY_SIDE = 4


def simulate(link_bytes_s: float, places: int, known: float | None = None, batches: int = 60) -> list[float]:
    """Turns of so many ``places``, in seconds, over a link that carries ``SIDE_BY_SIDE`` batches at a time."""
    size, turns = BatchSize(SIDE_BY_SIDE), []
    for _ in range(batches):
        each = size.bytes(MOST, known)
        turns.append(max(SIDE_BY_SIDE, places) * each / link_bytes_s)
        size.took(SIDE_BY_SIDE * each / link_bytes_s, places)
    return turns


@pytest.mark.parametrize("places", [1, 4, 40])
@pytest.mark.parametrize("mbit_s", [8, 67, 1000])
def test_every_push_has_its_turn_well_before_a_load_gives_it_up(mbit_s: int, places: int) -> None:
    turns = simulate(mbit_s * 1e6 / 8, places)
    least_s = max(SIDE_BY_SIDE, places) * LEAST_BYTES / (mbit_s * 1e6 / 8)
    assert max(turns[20:]) <= max(2 * LONGEST_TURN_S, 2 * least_s)


def test_a_fast_link_gets_whole_batches() -> None:
    size = BatchSize(SIDE_BY_SIDE)
    for _ in range(10):
        assert size.bytes(MOST, 1.5e9) == MOST
        size.took(SIDE_BY_SIDE * MOST / 1.5e9, places=SIDE_BY_SIDE)


def test_the_first_batch_fits_a_link_that_is_known_to_be_slow() -> None:
    assert simulate(67e6 / 8, 1, known=67e6 / 8)[0] <= LONGEST_TURN_S


def test_a_link_that_was_slow_for_a_while_gets_whole_batches_again() -> None:
    size = BatchSize(SIDE_BY_SIDE)
    for _ in range(20):
        size.took(2.0, places=1)
    assert size.bytes(MOST, None) == LEAST_BYTES
    for _ in range(20):
        size.took(0.01, places=1)
    assert size.bytes(MOST, None) == MOST
