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
    def claim(self) -> Iterator[Claim]:
        """Room for a body, none at first, until its request is over."""
        claim = Claim(self)
        try:
            yield claim
        finally:
            self.held_bytes -= claim.size_bytes

    def take(self, before_bytes: int, after_bytes: int) -> None:
        """A body has grown. Raises ``Overloaded``."""
        others_bytes = self.held_bytes - before_bytes
        if others_bytes and others_bytes + after_bytes > self._limit_bytes:
            raise Overloaded(f"{others_bytes} bytes of requests are held already; retry later", RETRY_AFTER_S)
        self.held_bytes = others_bytes + after_bytes


class Claim:
    """Room that one body takes."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"<Claim {self.size_bytes} bytes>"

    def grow(self, size_bytes: int) -> None:
        """As much of the body has arrived. Raises ``Overloaded``."""
        self._bodies.take(self.size_bytes, size_bytes)
        self.size_bytes = size_bytes
