"""Where a prompt's pages are, told for each pair of a reader and a writer."""

import numpy as np

from kvrelay.fleet.ground import Place
from kvrelay.fleet.holdings import stored_tokens
from kvrelay.fleet.index import store_key
from kvrelay.types import PageName
from tests.fleet.values import names

ROOT = names(1)[0]


def place(*workers: str) -> Place:
    """Workers beside store s1, all of one kind."""
    many = len(workers)
    fill = np.ones(many)
    roots: tuple[PageName, ...] = (ROOT,) * many
    return Place(
        workers=(),
        names=workers,
        kv_tokens=fill,
        overtaken_share=fill,
        stores=np.zeros(many, dtype=np.int64),
        store_keys=(store_key("s1"),) * many,
        roots=roots,
        page_tokens=4 * fill,
        page_bytes=fill,
        token_bytes=fill,
    )


DEPTHS = {ROOT: {store_key("s1"): 3}}


def test_what_a_writers_node_has_is_told_in_the_readers_tokens() -> None:
    assert stored_tokens(place("p0", "p1"), place("d0"), DEPTHS).tolist() == [[12.0], [12.0]]


def test_known_pages_are_no_fault_when_every_reader_is_left_alone() -> None:
    assert stored_tokens(place(), place("d0"), DEPTHS).shape == (0, 1)
    assert stored_tokens(place("p0"), place(), DEPTHS).shape == (1, 0)
