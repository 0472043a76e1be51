"""One page that the store knows: where it lies, who holds it, who fills it.

Plain state: the catalog and its parts change it, and whoever receives a page counts the layers that came in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvrelay.store.arena import SlotState
from kvrelay.store.shelf import Shelf
from kvrelay.types import PageName, SlotRef

FOREVER = float("inf")


@dataclass(slots=True, eq=False)
class Writer:
    """Somebody who writes into slots: a client's link or a peer's. Its end is the end of what it did not finish."""

    label: str
    """Its owner, or the peer store."""
    granted: dict[SlotRef, Shelf] = field(default_factory=dict)
    """Slots taken ahead and not announced yet."""
    filling: set[Page] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"<Writer {self.label}, {len(self.granted)} granted, {len(self.filling)} filling>"


class Coming(NamedTuple):
    """Pages of one chain that a peer sends, as columns; the store has none of their names."""

    names: list[PageName]
    refs: list[SlotRef]
    tokens: list[int]
    parents: list[PageName | None]
    """Names of the pages before them in their chain."""
    shards: int


class Page(msgspec.Struct, eq=False, gc=False):
    """A named run of KV in one slot.

    Python's collector does not look at it: the only circle that it is part of, over the set of its writer, ends with
    that set, and with a hundred thousand of them every full collection would hold up the store.
    """

    name: PageName
    shelf: Shelf
    ref: SlotRef
    tokens: int
    writer: Writer
    moved_at: float
    """When its last layer came in, on the store's clock."""
    shards: int = 1
    """Writers that fill it together, each its share of the KV heads."""
    state: SlotState = SlotState.FILLING
    layers_in: int = 0
    pins: int = 0
    parent: Page | None = None
    children: int = 0
    """Pages here that continue this one: it is evicted after them."""
    used: int = 0
    """Position in the order of use; higher is later."""
    keep_until: float = 0.0
    """A partial page is spared until then, and first to go afterwards."""
    free_at: float = 0.0
    """A failed page's slot is not used again before: its writer may still be writing."""

    def __repr__(self) -> str:
        progress = f"{self.layers_in}/{self.shelf.arena.format.layers} layers"
        return f"<Page {self.name.hex()[:8]} {self.state.name.lower()}, {progress}, {self.pins} pins>"

    @property
    def is_partial(self) -> bool:
        return self.tokens < self.shelf.arena.format.page_tokens

    @property
    def is_being_written(self) -> bool:
        """Whether its writer still has the slot, though the page may have been given up already."""
        return self.state is SlotState.FILLING or (self.state is SlotState.FAILED and self.free_at == FOREVER)

    @property
    def is_evictable(self) -> bool:
        return self.state is SlotState.COMPLETE and self.pins == 0 and self.children == 0
