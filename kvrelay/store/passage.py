"""How one push went, as its sender saw it: bytes taken by the peer, time under way, what was left after the prefill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Passage:
    """Batches leave, and count once the peer said that it has taken them: then they are in its arena, and verified.

    A transfer that is pushed layer by layer is open for as long as the prefill, and idle for most of that: its bytes
    over its whole duration would say how fast P computes, and not how fast the link is.
    """

    retries: int = 0
    """Batches that were begun again, on another stream or by another transport."""
    in_flight: int = 0
    """Batches that are being carried."""
    moving_s: float = 0.0
    """Time with a batch under way; batches side by side count once."""
    taken_bytes: int = 0
    _taken_when_whole: int | None = None
    """Bytes that the peer had taken when the prompt's last layer was here."""
    _since: float = 0.0

    @property
    def is_prefill_over(self) -> bool:
        """The prompt's last layer is here."""
        return self._taken_when_whole is not None

    @property
    def late_bytes(self) -> int:
        """Bytes that were still to move when the prefill ended; known once everything was sent."""
        return self.taken_bytes - (self._taken_when_whole or 0)

    def leave(self, now: float) -> None:
        """A batch is under way."""
        self._since = self._since if self.in_flight else now
        self.in_flight += 1

    def land(self, retries: int, now: float) -> None:
        """A batch is under way no more, whether it was taken or not."""
        self.retries += retries
        self.in_flight -= 1
        if not self.in_flight:
            self.moving_s += now - self._since

    def take(self, size_bytes: int) -> None:
        """The peer has so much more."""
        self.taken_bytes += size_bytes

    def end_prefill(self) -> None:
        """The prompt's last layer came in just now."""
        self._taken_when_whole = self.taken_bytes
