"""Where a prompt's pages are, told for each pair of a prefill and a decode worker."""

from kvrelay.fleet.holdings import Depths, Holdings, stored_tokens
from kvrelay.fleet.index import PageIndex, store_key
from kvrelay.fleet.links import Links
from kvrelay.fleet.prefix_finder import ENGINE, STORE
from kvrelay.fleet.prefixes import Prefixes
from kvrelay.fleet.topology import WorkerColumns
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.cost import Hints, Offer
from kvrelay.types import PageName
from tests.fleet.values import names

ROOT, OTHER = names(1, 2)


def columns(*workers: str, root: PageName = ROOT, page_tokens: int = 4) -> WorkerColumns:
    """Workers beside store s1, all of one kind."""
    many = len(workers)
    fill = (1,) * many
    return WorkerColumns(
        workers=(),
        names=workers,
        kv_tokens=fill,
        lets_pass=(False,) * many,
        chunk_tokens=fill,
        stores=(0,) * many,
        store_keys=(store_key("s1"),) * many,
        roots=(root,) * many,
        kinds={root: list(range(many))} if workers else {},
        page_tokens=(page_tokens,) * many,
        page_bytes=fill,
        token_bytes=fill,
        context_tokens=fill,
    )


DEPTHS = {ROOT: {store_key("s1"): 3, "p1": 2, "p2": 3}, OTHER: {store_key("s1"): 2}}


def test_what_the_node_of_d_has_is_told_in_tokens_of_p() -> None:
    assert stored_tokens(columns("p0", "p1"), columns("d0"), DEPTHS) == [[12.0], [12.0]]
    assert stored_tokens(columns("p0", root=OTHER, page_tokens=8), columns("d0"), DEPTHS) == [[16.0]]


def test_known_pages_are_no_fault_when_every_prefill_worker_is_left_alone() -> None:
    assert stored_tokens(columns(), columns("d0"), DEPTHS) == []
    assert stored_tokens(columns("p0"), columns(), DEPTHS) == [[]]


def test_a_worker_is_offered_what_it_holds_and_what_its_node_has_beyond_that() -> None:
    links, fleet = Links(), Fleet(1.0)
    (row,) = links.rows(["s1"])
    prefixes = Prefixes(fleet, links, Holdings(fleet, PageIndex(), links), 10.0)

    def offers(depths: Depths, *workers: str) -> list[list[Offer]]:
        there = columns(*workers)
        found = prefixes.finder.offers(there, prefixes.finder.look({}, depths, 0.0, may_wait=True), 100, 0.0)
        own = [max(0, *(depths[ROOT].get(holder, 0) for holder in (name, store_key("s1")))) for name in workers]
        stored = depths[ROOT].get(store_key("s1"), 0)
        assert found.hints() == Hints(at_hand=[4 * pages for pages in own], stored=[stored] * len(own), coming=[])
        return [found[at] for at in range(len(workers))]

    loaded = (STORE, 12, links.restore_s(row, 3))
    assert offers(DEPTHS, "p0", "p1", "p2") == [
        [(ENGINE, 0, 0.0), loaded],
        [(ENGINE, 8, 0.0), loaded],
        [(ENGINE, 12, 0.0)],
    ]
    assert offers({ROOT: {"other": 3}}, "p0") == [[(ENGINE, 0, 0.0)]]
