"""Memory for bytes that come in and that nobody will read. It must never grow with what a peer sends."""

from __future__ import annotations

_CHUNK_BYTES = 1 << 20


class Waste:
    """One chunk, made when it is first needed, that is written over and over."""

    def __init__(self) -> None:
        self._chunk = bytearray()

    def __repr__(self) -> str:
        return f"<Waste of {len(self._chunk)} bytes>"

    def views(self, size_bytes: int) -> list[memoryview]:
        """Views of ``size_bytes`` in all."""
        if not self._chunk:
            self._chunk = bytearray(_CHUNK_BYTES)
        whole = memoryview(self._chunk)
        return [whole] * (size_bytes // _CHUNK_BYTES) + [whole[: size_bytes % _CHUNK_BYTES]]
