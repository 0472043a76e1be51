"""What the scheduler half remembers of one request, from its arrival until its end. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.connector.plan import LoadJob
from kvrelay.connector.saves import SaveProgress
from kvrelay.connector.search import Search
from kvrelay.types import PageName


@dataclass
class Tracked:
    """One request that the engine holds."""

    saves: SaveProgress
    search: Search | None
    lease: str = ""
    """Holds the pins of the load in flight."""
    no_load: bool = False
    """A load of this request failed: the rest is computed, or the engine would ask for ever."""
    load: LoadJob | None = None
    """In flight: from the allocation of blocks to the worker's report."""
    load_bad: set[int] = field(default_factory=set)
    """Its blocks that one of the engine's ranks could not fill; the ranks report at different times."""
    load_names: list[PageName] = field(default_factory=list)
    """Names of the load's pages, from the prompt's first one on."""
    transfers: tuple[str, ...] = ()
    """Transfers that bring this request's pages (decode leg)."""
    home: str | None = None
    """Store of another node to which the generated pages go."""
    prefill_started: bool = False
    last_chunk_seen: bool = False
