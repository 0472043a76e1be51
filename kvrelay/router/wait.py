"""Since when a request waits for a word of its decode worker. It must never count time in which the client is slow."""

from __future__ import annotations

from collections.abc import Callable


class Wait:
    """One request's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.since_s: float | None = None
        """None: it does not wait."""

    def __repr__(self) -> str:
        return "<Wait, none>" if self.since_s is None else f"<Wait of {self._clock() - self.since_s:.3f} s>"

    def begin(self) -> None:
        self.since_s = self._clock()

    def end(self) -> None:
        self.since_s = None
