"""Where a prompt's pages are, told for each pair of a reader and a writer."""

import numpy as np

from kvrelay.fleet.ground import Place
from kvrelay.fleet.holdings import Holdings, stored_tokens
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.fit import Floats
from kvrelay.types import PageName
from tests.fleet.values import names

ROOT, OTHER = names(1, 2)


def place(*workers: str, root: PageName = ROOT, page_tokens: int = 4) -> Place:
    """Workers beside store s1, all of one kind."""
    many = len(workers)
    fill = np.ones(many)
    roots: tuple[PageName, ...] = (root,) * many
    return Place(
        workers=(),
        names=workers,
        kv_tokens=fill,
        passing_tokens=fill,
        stores=np.zeros(many, dtype=np.int64),
        store_keys=(store_key("s1"),) * many,
        roots=roots,
        kinds={root: fill > 0} if workers else {},
        at={},
        page_tokens=page_tokens * fill,
        page_bytes=fill,
        token_bytes=fill,
    )


DEPTHS = {ROOT: {store_key("s1"): 3}, OTHER: {store_key("s1"): 2}}


def stored(reading: Place, writing: Place) -> Floats:
    """With what the writers themselves find there."""
    links = Links()
    links.rows(["s1"])
    held = Holdings(Fleet(1.0), PageIndex(), links).sources(writing, DEPTHS)
    return stored_tokens(reading, writing, DEPTHS, held)


def test_what_a_writers_node_has_is_told_in_the_readers_tokens() -> None:
    assert stored(place("p0", "p1"), place("d0")).tolist() == [[12.0], [12.0]]
    assert stored(place("p0", root=OTHER, page_tokens=8), place("d0")).tolist() == [[16.0]]


def test_known_pages_are_no_fault_when_every_reader_is_left_alone() -> None:
    assert stored(place(), place("d0")).shape == (0, 1)
    assert stored(place("p0"), place()).shape == (1, 0)
