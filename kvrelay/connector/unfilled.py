"""Pages that a step was to fill, until they are whole or it is clear that they never will be."""

from __future__ import annotations

from collections import deque

import numpy as np

from kvrelay.store.arena import Arena
from kvrelay.types import SlotRef


class PlannedPages:
    """The pages of the steps in progress. On a device a step's copies may go on after it."""

    def __init__(self, wait_s: float) -> None:
        """``wait_s``: how long after its step was planned a page may be unfilled; 0: until the next step."""
        self._wait_s = wait_s
        self._arena: Arena | None = None
        self._steps: deque[tuple[float, list[SlotRef]]] = deque()

    def __repr__(self) -> str:
        return f"<PlannedPages of {len(self._steps)} steps>"

    def add(self, now: float, arena: Arena | None, pages: list[SlotRef]) -> None:
        """A step that begins now is to fill ``pages`` of ``arena``."""
        if arena is not self._arena:
            # Of another arena nothing is known any more.
            self._arena = arena
            self._steps.clear()
        if pages:
            self._steps.append((now, pages))

    def missing(self, now: float, arena: Arena | None) -> list[SlotRef]:
        """Pages of steps that are over which will never be whole (no store at that time, or a fault), each once."""
        if arena is None or arena is not self._arena:
            return []
        due: list[SlotRef] = []
        while self._steps and now - self._steps[0][0] >= self._wait_s:
            due += self._steps.popleft()[1]
        if not due:
            return []
        slots = np.array([ref.slot for ref in due], dtype=np.int64)
        generations = np.array([ref.generation for ref in due], dtype=np.int64)
        filled = np.all(arena.ready_layers(slots, generations), axis=0)
        # A page may be complete, evicted and its slot given away by now: that is no fault.
        return [due[index] for index in np.flatnonzero(~filled & arena.current(slots, generations))]
