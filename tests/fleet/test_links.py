"""Ways between stores as matrices."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.fleet.links import Links
from kvrelay.policy.moves import link, tier


def test_a_store_reaches_itself_through_memory_and_others_over_a_link() -> None:
    links = Links()
    rows = links.rows(["a", "b"])
    matrices = links.between(rows, rows)
    near, far = tier("memory"), link()
    assert matrices.latency_s.tolist() == [[near.latency_s, far.latency_s], [far.latency_s, near.latency_s]]
    assert matrices.s_per_byte[0, 1] == far.s_per_byte
    assert links.restore_s(rows, np.array([1e9, 0.0])) == pytest.approx([near.seconds(1e9), near.latency_s])


def test_what_was_learned_of_one_way_changes_that_way_only() -> None:
    links = Links()
    links.learn("a", "b", links.move("a", "b").saw_moving(1e8, 1.0))
    rows = links.rows(["a", "b"])
    s_per_byte = links.between(rows, rows).s_per_byte
    assert s_per_byte[0, 1] == pytest.approx(1e-8, rel=0.05)
    assert s_per_byte[1, 0] == link().s_per_byte
    again = Links()
    again.recall(links.known())
    assert again.move("a", "b") == links.move("a", "b")
    assert again.between(again.rows(["a"]), again.rows(["b"])).s_per_byte == s_per_byte[0, 1]


def test_bytes_on_the_way_are_counted_and_end_at_zero() -> None:
    links = Links()
    links.promise("a", "b", 100)
    links.promise("a", "b", 50)
    rows = links.rows(["a", "b"])
    assert links.between(rows, rows).in_flight_bytes.tolist() == [[0, 150], [0, 0]]
    links.check({("a", "b"): 150})
    with pytest.raises(AssertionError, match="on the way"):
        links.check({})
    links.promise("a", "b", -150)
    links.check({})


def test_many_stores_grow_the_matrices_and_their_rows_are_used_again() -> None:
    links = Links()
    names = [f"s{number}" for number in range(40)]
    rows = links.rows(names)
    assert sorted(rows.tolist()) == list(range(40))
    links.learn("s39", "s0", links.move("s39", "s0").saw_moving(1e8, 1.0))
    links.promise("s1", "s2", 7)
    links.keep_only(["s0"])
    assert repr(links) == "<Links 3 stores, 0 known ways>"  # something is still on the way from s1 to s2
    assert links.rows(["new"]).tolist() == [3]
    assert links.between(links.rows(["s0"]), links.rows(["new"])).s_per_byte[0, 0] == link().s_per_byte
