"""One request of a mock worker between its sequences and its answer. It must never leave a sequence to an engine that
nobody waits for."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvrelay.deploy.mock.answer import DONE, Shape
from kvrelay.deploy.mock.asked import Body
from kvrelay.deploy.mock.engine import Engine, Took
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.mock.sequence import Sequence
from kvrelay.protocol.engine import Handoff


class Served(Protocol):
    """The worker behind the server."""

    engine: Engine

    @property
    def faults(self) -> Faults:
        """What is wrong with it now."""

    def leg(self, body: Body) -> Handoff | None:
        """What the router ordered, as far as this worker understands it."""

    def submit(self, sequence: Sequence, took: Took) -> None:
        """Let the engine compute it."""

    async def reachable(self) -> None:
        """Wait until its network is there."""


class Answering:
    """The sequences of one request while the engine writes them."""

    def __init__(self, served: Served, shape: Shape, sequences: list[Sequence], *, streams: bool) -> None:
        self.broken = False
        """It broke off, since that was asked for."""
        self._served = served
        self._shape = shape
        self._sequences = sequences
        self._index = {sequence: at for at, sequence in enumerate(sequences)}
        self._streams = streams
        self._open = len(sequences)
        self._written = 0
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        for sequence in sequences:
            served.submit(sequence, self._took)

    def __repr__(self) -> str:
        return f"<Answering {self._open} of {len(self._sequences)} sequences open, {self._written} tokens>"

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.broken or (not self._open and not self._events)

    def _took(self, sequence: Sequence, token: int) -> None:
        limit = self._served.faults.drop_after
        if limit is not None and self._written >= limit:
            self.broken = True
        else:
            self._keep(sequence, token)
        if self._streams or self.broken or not self._open:
            self._news.set()

    def _keep(self, sequence: Sequence, token: int) -> None:
        self._written += 1
        self._open -= sequence.ending is not None
        if self._streams:
            index = self._index[sequence]
            head = self._shape.first(index, sequence) if sequence.written == 1 else b""
            self._events.append(head + self._shape.token(index, sequence, token))

    async def until_whole(self) -> None:
        while self._open and not self.broken:
            await self._news.wait()
            self._news.clear()

    async def events(self) -> bytes:
        """The events of at least one token; empty when the answer has broken off."""
        while not self._events and not self.broken:
            await self._news.wait()
            self._news.clear()
        events, self._events = self._events, []
        return b"".join(events)

    def last(self, *, usage: bool) -> bytes:
        return (self._shape.usage(self._sequences) if usage else b"") + DONE

    def close(self) -> None:
        for sequence in self._sequences:
            self._served.engine.cancel(sequence)
