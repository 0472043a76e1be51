"""Tests of deploy/mock/kv_cache.py: blocks by name, the least recently used evicted first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.deploy.mock.kv_cache import KvCache
from kvrelay.types import PageName
from tests.fleet.values import names

A, B, C, D, E = names(1, 2, 3, 4, 5)


class Told:
    """What the cache said."""

    def __init__(self) -> None:
        self.here: set[PageName] = set()
        self.cache = KvCache(4, stored=self.here.update, removed=self.here.difference_update)

    def fill(self, *pages: PageName) -> None:
        """A request fills blocks with ``pages``, and ends."""
        assert self.cache.take(len(pages))
        self.cache.fill(pages)
        self.cache.release(pages, 0)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.cache.check_invariants()


def test_what_was_filled_is_found_until_its_room_is_needed(told: Told) -> None:
    told.fill(A, B, C)
    assert told.cache.match([A, B, C, D]) == 3
    told.fill(D, E)
    assert told.here == {A, B, D, E}, "of the oldest prompt its end went first"
    assert told.cache.match([A, B, C]) == 2


def test_who_is_used_again_is_evicted_later(told: Told) -> None:
    told.fill(A, B)
    told.fill(C)
    told.cache.hold([A])
    told.cache.release([A], 0)
    told.fill(D, E)
    assert told.here == {A, C, D, E}


def test_what_a_request_uses_is_not_evicted(told: Told) -> None:
    told.fill(A, B, C)
    told.cache.hold([A, B])
    assert not told.cache.take(3)
    assert told.cache.take(2)
    assert told.here == {A, B}
    assert told.cache.usage == 1.0
    told.cache.release([A, B], 2)
    assert told.cache.used_blocks == 0


def test_a_page_that_two_requests_compute_takes_one_block(told: Told) -> None:
    assert told.cache.take(2)
    told.cache.fill([A])
    told.cache.fill([A])
    assert told.cache.used_blocks == 1
    told.cache.release([A], 0)
    assert told.cache.used_blocks == 1
    told.cache.release([A], 0)
    assert told.cache.used_blocks == 0
    assert told.cache.match([A]) == 1
