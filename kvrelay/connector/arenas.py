"""The store's arenas as one rank maps them: that of its own pages, and of other KV types from their first load on."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvrelay.store.arena import Arena
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat


class Absent(Enum):
    """Why there is no arena."""

    ATTACHING = "attaching"
    """It may be there soon: a load waits for it as long as for pages."""
    AWAY = "away"


Find = Callable[[], Arena | Absent]
"""How the loader's thread gets the arena of a load. It never waits: the loads of other arenas go on."""


class Arenas:
    """Attachments of one rank. Called from the forward thread."""

    def __init__(self, own: StoreClient, connect: Callable[[PageFormat], StoreClient]) -> None:
        """``connect`` starts a client for pages of another format."""
        self._own = own
        self._connect = connect
        self._others: dict[PageFormat, StoreClient] = {}

    def __repr__(self) -> str:
        return f"<Arenas of {self._own!r} and {len(self._others)} others>"

    def of(self, format: PageFormat | None) -> Find:
        """How the loader's thread gets the arena that holds pages of ``format`` (None: the engine's own)."""
        client = self.client(format)
        if client is self._own:
            arena = client.arena or Absent.AWAY
            return lambda: arena
        return lambda: client.arena or Absent.ATTACHING

    def client(self, format: PageFormat | None) -> StoreClient:
        """The link that slots of ``format``'s arena are spoken of on (None: the engine's own)."""
        if format is None:
            return self._own
        if format not in self._others:
            self._others[format] = self._connect(format)
        return self._others[format]

    def close(self) -> None:
        """End the attachments that were made here."""
        for client in self._others.values():
            client.close()
