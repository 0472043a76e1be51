"""Empty slots that the store granted ahead of need, so that a writer never waits for one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from kvrelay.types import SlotRef


class SlotStock:
    """Granted slots by arrival, safe from any thread. Emptied when the link to the store breaks."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._slots: deque[SlotRef] = deque()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<SlotStock {len(self._slots)} of {self.target}>"

    @property
    def missing(self) -> int:
        """How many to ask for to be back at the target."""
        return max(0, self.target - len(self._slots))

    @property
    def is_low(self) -> bool:
        """Time to refill: not for every slot, each question wakes two threads."""
        return self.missing > self.target // 4

    def take(self, count: int) -> list[SlotRef]:
        """Up to ``count`` slots; fewer when out."""
        with self._lock:
            return [self._slots.popleft() for _ in range(min(count, len(self._slots)))]

    def add(self, slots: Iterable[SlotRef]) -> None:
        with self._lock:
            self._slots.extend(slots)

    def clear(self) -> None:
        with self._lock:
            self._slots.clear()
