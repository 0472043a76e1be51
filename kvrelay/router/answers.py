"""What a request comes to: one answer in a piece, or a stream of events. It must never be made before the answer is
known to be one."""

from __future__ import annotations

from collections.abc import AsyncIterator


class Whole:
    """A complete answer."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"<Whole answer of {len(self.body)} bytes>"


class Stream:
    """An answer whose first events are here; ``blocks`` starts with them."""

    def __init__(self, blocks: AsyncIterator[bytes]) -> None:
        self.blocks = blocks

    def __repr__(self) -> str:
        return "<Stream answer>"
