"""How many bytes of request bodies the router holds. It must never let more in than it has room for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvrelay.errors import Overloaded
from kvrelay.policy.admit import RETRY_AFTER_S


class Bodies:
    """Room for all bodies. An empty one takes a body of any length: the limit of a single body is another's."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<Bodies {self.held_bytes}/{self._limit_bytes} bytes>"

    @contextlib.contextmanager
    def claim(self, size_bytes: int) -> Iterator[Claim]:
        """Room for a body of at most ``size_bytes``, until its request is over. Raises ``Overloaded``."""
        if self.held_bytes and self.held_bytes + size_bytes > self._limit_bytes:
            raise Overloaded(f"{self.held_bytes} bytes of requests are held already; retry later", RETRY_AFTER_S)
        claim = Claim(self)
        try:
            claim.resize(size_bytes)
            yield claim
        finally:
            claim.resize(0)


class Claim:
    """Room that one body takes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"<Claim {self.size_bytes} bytes>"

    def resize(self, size_bytes: int) -> None:
        """The body's length is known better now."""
        self._bodies.held_bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes
