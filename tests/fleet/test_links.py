"""Ways between stores as tables."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.fleet.links import Links
from kvrelay.policy.moves import Move, link, restore


def test_a_store_reaches_itself_through_memory_and_others_over_a_link() -> None:
    links = Links()
    here, there = links.rows(["a", "b"])
    tables = links.tables
    near, far = restore(), link()
    ways = [(here, here), (here, there), (there, here), (there, there)]
    assert [tables.latency_s[a][b] for a, b in ways] == [
        near.latency_s,
        far.latency_s,
        far.latency_s,
        near.latency_s,
    ]
    assert tables.s_per_byte[here][there] == far.s_per_byte
    assert links.restore_s(here, 1e9) == pytest.approx(near.seconds(1e9))
    assert links.restore_s(there, 0.0) == near.latency_s


def test_what_was_learned_of_one_way_changes_that_way_only() -> None:
    links = Links()
    links.learn("a", "b", links.move("a", "b").saw_moving(1e8, 1.0))
    here, there = links.rows(["a", "b"])
    s_per_byte = links.tables.s_per_byte
    assert s_per_byte[here][there] == pytest.approx(1e-8, rel=0.05)
    assert s_per_byte[there][here] == link().s_per_byte
    again = Links()
    again.recall(links.known())
    assert again.move("a", "b") == links.move("a", "b")
    before, after = again.rows(["a", "b"])
    assert again.tables.s_per_byte[before][after] == s_per_byte[here][there]


def test_ways_between_stores_of_any_name_outlive_a_router() -> None:
    links, ways = Links(), [("a>b", "c"), ("a", "b>c"), (">", '"'), ("x", "x")]
    for count, way in enumerate(ways, 1):
        links.learn(*way, links.move(*way).saw_moving(1e8, float(count)))
    again = Links()
    again.recall(msgspec.json.decode(msgspec.json.encode(links.known()), type=dict[str, Move]))
    assert [again.move(*way) for way in ways] == [links.move(*way) for way in ways]


@pytest.mark.parametrize("way", ["a>b", "", '["a"]', '["a", 1]', '["a", "b", "c"]'])
def test_what_is_no_way_is_not_recalled(way: str) -> None:
    links = Links()
    links.recall({way: link().saw_moving(1e8, 1.0)})
    assert links.known() == {}


def test_the_least_latency_of_a_store_follows_what_is_learned() -> None:
    links = Links()
    rows = links.rows(["a", "b", "c"])
    assert [links.least_s(row) for row in rows] == [link().latency_s] * 3
    quick = links.move("a", "b")
    for _ in range(50):
        quick = quick.saw_exposed(0, 1e-5)
    links.learn("a", "b", quick)
    assert [links.least_s(row) for row in rows] == [quick.latency_s, link().latency_s, link().latency_s]
    assert quick.latency_s < link().latency_s
    links.keep_only(["a", "c"])
    assert links.least_s(rows[0]) == link().latency_s
    assert links.leasts_s(rows) == [links.least_s(row) for row in rows]


def test_bytes_on_the_way_are_counted_and_end_at_zero() -> None:
    links = Links()
    links.promise("a", "b", 100)
    links.promise("a", "b", 50)
    here, there = links.rows(["a", "b"])
    moving = links.tables.in_flight_bytes
    assert [moving[a][b] for a, b in [(here, here), (here, there), (there, here), (there, there)]] == [0, 150, 0, 0]
    links.check({("a", "b"): 150})
    with pytest.raises(AssertionError, match="on the way"):
        links.check({})
    links.promise("a", "b", -150)
    links.check({})


def test_many_stores_grow_the_tables_and_their_rows_are_used_again() -> None:
    links = Links()
    names = [f"s{number}" for number in range(40)]
    rows = links.rows(names)
    assert sorted(rows) == list(range(40))
    links.learn("s39", "s0", links.move("s39", "s0").saw_moving(1e8, 1.0))
    links.promise("s1", "s2", 7)
    links.keep_only(["s0"])
    assert repr(links) == "<Links 3 stores, 0 known ways>"  # something is still on the way from s1 to s2
    assert links.rows(["new"]) == (3,)
    assert links.tables.s_per_byte[links.rows(["s0"])[0]][3] == link().s_per_byte
    assert links.tables.s_per_byte[39][0] == link().s_per_byte
