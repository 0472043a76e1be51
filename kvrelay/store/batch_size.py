"""How much of one push goes to a peer at a time. It must never be so much that the next push seems to be dead.

A decode worker gives up a hand-off of which nothing comes for ``worker.load_wait_s``, two seconds unless told
otherwise, and sees no part of a batch before the peer has verified that part.
"""

from __future__ import annotations

LONGEST_TURN_S = 0.25
"""All hand-offs to a peer, and one bulk copy, have had a batch within so long: an eighth of what a load waits."""
LEAST_BYTES = 64 << 10


class BatchSize:
    """Halved when batches take long, doubled when they do not: links slow down, and are shared with others."""

    def __init__(self, side_by_side: int) -> None:
        """``side_by_side``: batches on their way at a time."""
        self._side_by_side = side_by_side
        self._part = 1
        """One batch is this part of what it could be."""

    def __repr__(self) -> str:
        return f"<BatchSize 1/{self._part}>"

    def bytes(self, most_bytes: int, link_bytes_s: float | None) -> int:
        """Of the next batch, over a link of that speed (None: not known)."""
        if link_bytes_s is not None:
            most_bytes = min(most_bytes, int(link_bytes_s * LONGEST_TURN_S / self._side_by_side))
        return max(LEAST_BYTES, most_bytes // self._part)

    def took(self, seconds: float, places: int) -> None:
        """A batch was carried in so long, while a turn of all pushes was so many batches (``Turns.places``)."""
        turn_s = seconds * max(1.0, places / self._side_by_side)
        if turn_s > LONGEST_TURN_S:
            self._part = min(1024, 2 * self._part)
        elif turn_s < LONGEST_TURN_S / 4:
            self._part = max(1, self._part // 2)
