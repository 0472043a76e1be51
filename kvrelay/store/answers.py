"""What a store tells of itself to whoever holds the key, on this node or another: which pages are here, its counters.

Nothing is pinned by an answer: a page may be gone, or be here, a moment later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.channel import Channel
from kvrelay.errors import Malformed
from kvrelay.protocol.client import Describe, Described, Existing, Exists
from kvrelay.store.keeper import Keeper
from kvrelay.store.peers import Peers


class Answers:
    """Of one store."""

    def __init__(self, keeper: Keeper, peers: Peers, clock: Callable[[], float]) -> None:
        self._keeper = keeper
        self._peers = peers
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Answers of {self._keeper.name}>"

    def to(self, question: Exists | Describe) -> Existing | Described:
        """The answer as of now."""
        if isinstance(question, Exists):
            return Existing(id=question.id, present=self._keeper.exists(question.names, self._clock()))
        return Described(id=question.id, counts=self._keeper.describe(), links=self._peers.reports)

    async def serve(self, link: Channel, stall_s: float) -> None:
        """Answer until the caller is gone, or stops reading for ``stall_s``. Raises ``Lost``, ``Malformed``."""
        while True:
            message = await link.recv()
            if not isinstance(message, Exists | Describe):
                raise Malformed(f"an inquiry sent {type(message).__name__}")
            await link.send(self.to(message), stall_s=stall_s)
            # A caller that asks without end must not keep the loop from everybody else.
            await asyncio.sleep(0)
