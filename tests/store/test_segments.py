"""Segments as columns: where runs of memory begin, which are named twice, and what a peer may say of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.errors import Malformed
from kvrelay.protocol.peer import Manifest
from kvrelay.store.segments import begins_run, has_twins, read_manifest, tally

STEP = 64
FULL, SHORT = STEP, STEP // 2


@pytest.mark.parametrize(
    ("slots", "layers", "sizes", "begins"),
    [
        ([3, 3, 3], [0, 1, 2], [FULL] * 3, [1, 0, 0]),
        ([3, 3, 3], [0, 2, 3], [FULL] * 3, [1, 1, 0]),
        ([3, 3, 4], [0, 1, 2], [FULL] * 3, [1, 0, 1]),
        ([3, 3, 3], [0, 1, 2], [SHORT] * 3, [1, 1, 1]),
        ([3, 3, 3], [2, 1, 0], [FULL] * 3, [1, 1, 1]),
        ([], [], [], []),
    ],
    ids=["neighbours", "a gap", "another page", "a partial page", "backwards", "nothing"],
)
def test_a_run_ends_at_a_gap_and_at_the_end_of_a_page(
    slots: list[int], layers: list[int], sizes: list[int], begins: list[int]
) -> None:
    found = begins_run(np.array(slots, np.int64), np.array(layers, np.int64), np.array(sizes, np.int64), STEP)
    assert found.tolist() == [bool(each) for each in begins]


@pytest.mark.parametrize(
    ("keys", "expected"), [([1, 2, 5], False), ([5, 1, 2], False), ([1, 1], True), ([2, 1, 2], True)]
)
def test_twins_are_found_in_any_order(keys: list[int], expected: bool) -> None:
    assert has_twins(np.array(keys)) is expected


def test_a_tally_counts_each_row_once() -> None:
    distinct, counts = tally(np.array([7, 5, 7, 7]))
    assert (distinct.tolist(), counts.tolist()) == ([5, 7], [1, 3])
    assert [len(each) for each in tally(np.array([], np.int64))] == [0, 0]


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = Manifest([4, 4], [0, 1], [1, 2, 3, (1 << 64) - 1])
    columns = read_manifest(manifest)
    assert columns.shards == 2
    assert columns.manifest() == manifest


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest([], [], []),
        Manifest([1], [], [1]),
        Manifest([1], [0, 1], [1, 2]),
        Manifest([1, 2], [0, 0], [1]),
        Manifest([1, 2], [0, 0], [1, 2, 3]),
        Manifest([1], [0], []),
    ],
    ids=repr,
)
def test_columns_that_do_not_fit_one_another_are_refused(manifest: Manifest) -> None:
    with pytest.raises(Malformed):
        read_manifest(manifest)
