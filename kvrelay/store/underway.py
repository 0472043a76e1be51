"""Batches that a peer is sending, by serial. One that is begun again ends what of it still comes over another link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from kvrelay.channel import Channel


class UnderWay:
    """The batches of one peer that are being received and verified."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[Channel | None, asyncio.Event]] = {}

    def __repr__(self) -> str:
        return f"<UnderWay {len(self._batches)} batches>"

    @contextlib.contextmanager
    def receiving(self, serial: int, link: Channel | None) -> Iterator[None]:
        """A batch comes over ``link``, or is here; nothing of it may still come elsewhere: see ``supersede``."""
        over = asyncio.Event()
        self._batches[serial] = (link, over)
        try:
            yield
        finally:
            del self._batches[serial]
            over.set()

    async def supersede(self, serial: int) -> None:
        """The sender begins a batch again: what of it is still coming over a link that it gave up ends first."""
        while (batch := self._batches.get(serial)) is not None:
            link, over = batch
            if link is not None:
                link.close()
            await over.wait()
