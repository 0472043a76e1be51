"""What a request comes to: one answer in a piece, or a stream of events. It must never be made before the answer is
known to be one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol


class WholeAnswer:
    """An answer that was not streamed: its whole body."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"<WholeAnswer of {len(self.body)} bytes>"


class Outlet(Protocol):
    """A client that takes events."""

    @property
    def is_ready(self) -> bool:
        """It has read all before."""

    def write(self, block: bytes) -> None:
        """Send whole events at once."""


class StreamedAnswer:
    """An answer whose first events are here; ``blocks`` starts with them."""

    def __init__(self, blocks: AsyncIterator[bytes], shorten: Callable[[Outlet], None]) -> None:
        """``shorten``: from now on blocks may go straight to the outlet while ``blocks`` waits for its next one."""
        self.blocks = blocks
        self.shorten = shorten

    def __repr__(self) -> str:
        return "<StreamedAnswer>"
