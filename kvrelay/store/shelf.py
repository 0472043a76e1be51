"""The slots of one arena: which are free, and which of them occupy memory. It does not know what they hold."""

from __future__ import annotations

from kvrelay.store.arena import Arena
from kvrelay.store.doorbell import Doorbell
from kvrelay.types import SlotRef


class Shelf:
    """An arena with its free slots. A free slot is *warm* while its memory was not given back."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.doorbell = Doorbell.create()
        self._warm: list[int] = []
        self._cold: list[int] = []
        self._untouched = 0
        """Slots from here on were never used."""
        self._warming = 0

    def __repr__(self) -> str:
        return f"<Shelf {self.occupied} of {self.arena.slots} slots occupied, {len(self._warm)} warm>"

    @property
    def resident(self) -> int:
        """Slots that occupy memory, free ones included."""
        return self._untouched - len(self._cold)

    @property
    def occupied(self) -> int:
        """Slots that are not free."""
        return self.resident - len(self._warm) - self._warming

    @property
    def warm_bytes(self) -> int:
        """Free memory that needs no first touch."""
        return len(self._warm) * self.arena.stride

    @property
    def resident_bytes(self) -> int:
        return self.resident * self.arena.stride

    @property
    def free_slots(self) -> set[int]:
        """All free slots; for checks."""
        return {*self._warm, *self._cold, *range(self._untouched, self.arena.slots)}

    def take_warm(self, count: int) -> list[SlotRef]:
        """Up to ``count`` free slots whose memory is there already: no page faults, no budget."""
        first = max(0, len(self._warm) - count)
        taken, self._warm[first:] = self._warm[first:], []
        return self.arena.occupy(taken)

    def take_cold(self, count: int) -> list[SlotRef]:
        """Up to ``count`` free slots that will take memory."""
        return self.arena.occupy(self._next_cold(count))

    def _next_cold(self, count: int) -> list[int]:
        first = max(0, len(self._cold) - count)
        slots, self._cold[first:] = self._cold[first:], []
        fresh = range(self._untouched, min(self.arena.slots, self._untouched + count - len(slots)))
        self._untouched += len(fresh)
        return slots + list(fresh)

    def begin_warming(self, count: int) -> list[int]:
        """Up to ``count`` free slots to be given their memory ahead of need; ``end_warming`` brings them back."""
        slots = self._next_cold(count)
        self._warming += len(slots)
        return slots

    def end_warming(self, slots: list[int]) -> None:
        self._warming -= len(slots)
        self._warm += slots

    def free(self, slots: list[int]) -> None:
        """Take slots back; every reference to them is stale from now on."""
        self.arena.vacate(slots)
        self._warm += slots

    def cool(self) -> bool:
        """Give the memory of one free slot back to the machine; False when none holds any."""
        if not self._warm:
            return False
        slot = self._warm.pop(0)
        self.arena.punch(slot)
        self._cold.append(slot)
        return True

    def close(self) -> None:
        self.doorbell.close()
        self.arena.close()

    def check_invariants(self, held: list[int]) -> None:
        """Raise AssertionError unless each slot is free, or is once among those that are ``held``."""
        assert len(held) == len(set(held)), "a slot is held twice"
        assert self.free_slots.isdisjoint(held), "a held slot is free"
        assert len(self.free_slots) + len(held) == self.arena.slots, "a slot is lost"
