"""How fast engines load pages from the stores beside them, as the stores' counts say. It must never take the counts of
one life for those of the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvrelay.fleet.links import Links
from kvrelay.types import StoreInfo

MIN_BYTES = 1 << 20
"""A heartbeat brings what was loaded since the last one; less says nothing about a bandwidth."""


class Counted(NamedTuple):
    """What one life of a store had counted when it was heard last."""

    incarnation: str
    size_bytes: int = 0
    moving_us: int = 0


class Restores:
    """Learns how fast each store is read by the engines beside it: a way from the store to itself among ``links``."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._counted: dict[str, Counted] = {}

    def __repr__(self) -> str:
        return f"<Restores of {len(self._counted)} stores>"

    def heard(self, store: StoreInfo, counts: Mapping[str, int]) -> None:
        """A heartbeat of ``store`` brought its ``counts``."""
        now = Counted(store.incarnation, counts.get("restored_bytes", 0), counts.get("restore_us", 0))
        before = self._counted.get(store.name)
        if before is None or before.incarnation != store.incarnation:
            before = Counted(store.incarnation)
        size_bytes, moving_us = now.size_bytes - before.size_bytes, now.moving_us - before.moving_us
        if size_bytes < MIN_BYTES:
            return  # it adds up
        self._counted[store.name] = now
        if moving_us > 0:
            move = self._links.move(store.name, store.name).saw_moving(size_bytes, moving_us / 1e6)
            self._links.learn(store.name, store.name, move)

    def keep_only(self, stores: Iterable[str]) -> None:
        """Forget stores that nobody knows any more."""
        for store in self._counted.keys() - set(stores):
            del self._counted[store]
