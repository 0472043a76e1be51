"""When to look again for the layers of one load. It must never let the last one wait long: the request waits with it.

Each look wakes a thread on the engine's cores and takes the interpreter from its forward thread: there should be few.
Layers come at a pace, because a prefill computes them one after another: once some are in, the end can be foreseen.
"""

from __future__ import annotations

POLL_S = 0.0005
"""The shortest pause, near the moment at which the last layer should come."""
LATE_POLL_S = 0.005
"""The longest one when that moment is past, or unknown: all layers may come at once after a long wait for P."""
LONGEST_POLL_S = 0.05
"""The longest one while there is time."""
PAUSE_OF_WAIT = 0.25
"""Pauses are this part of the time until then, or since then: an estimate is wrong by a part of what it spans."""
PAUSE_OF_LOOKING = 10.0
"""Where many loads make a look long, the pause is so many times as long, up to ``LATE_POLL_S``: a look that was merely
held up must not make the loader blind."""


class Pace:
    """What is known of one load's layers. Times are those of one clock."""

    def __init__(self, layers: int, now: float) -> None:
        self._layers_left = layers
        self._looked_at = now
        """When the next layer was not there yet."""
        self._first_at = self._last_at = now
        """Lower bounds of when the first and the last of those that are in came; the load's beginning before that."""
        self._came = 0

    def __repr__(self) -> str:
        return f"<Pace {self._came} layers, one in {self._layer_s:.4f} s, {self._layers_left} left>"

    @property
    def _layer_s(self) -> float:
        """Of the first layer, the wait for it is all that is known; it may have been one for others to be computed."""
        return (self._last_at - self._first_at) / max(1, self._came - 1)

    def missed(self, now: float) -> None:
        """The next layer is not there."""
        self._looked_at = now

    def moved(self) -> None:
        """The next layer is there. It came after the last look that missed it."""
        self._layers_left -= 1
        self._came += 1
        if self._came == 2:
            self._first_at = self._last_at
        self._last_at = self._looked_at

    def pause_s(self, looked_s: float) -> float:
        """How long to leave the arena alone after a look of ``looked_s`` that missed."""
        now, layer_s = self._looked_at, self._layer_s
        late_s = now - self._last_at - layer_s * self._layers_left
        most_s = LONGEST_POLL_S if late_s < 0.0 else LATE_POLL_S
        return max(
            POLL_S,
            min(LATE_POLL_S, PAUSE_OF_LOOKING * looked_s),
            min(most_s, PAUSE_OF_WAIT * abs(late_s)),
        )
