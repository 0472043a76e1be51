"""What a push's link asks of a way to carry pages. Whoever implements it runs ``tests/store/test_paths.py``."""

from __future__ import annotations

from typing import Protocol

from kvrelay.store.batch import Batch
from kvrelay.types import Transport


class Path(Protocol):
    """One way to carry batches to one peer. The peer verifies what it gets, whatever way that came."""

    @property
    def transport(self) -> Transport:
        """What routers call it."""
        ...

    def takes(self, batch: Batch) -> bool:
        """Whether it can carry this one."""
        ...

    async def probe(self, pattern: memoryview) -> bool:
        """Carry ``pattern`` to where nothing lives; whether the peer found it whole there. Raises ``Lost``."""
        ...

    async def carry(self, batch: Batch) -> int:
        """Carry ``batch``; the peer has taken it on return. How often it was begun again.

        Raises ``Refused`` when this one must go another way, and ``Lost``: then the path is of no use any more, and is
        to be closed.
        """
        ...

    def close(self) -> None:
        """Free everything; whoever waits in ``carry`` gets ``Lost``. Safe to call twice."""
        ...
