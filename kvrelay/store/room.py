"""The one memory budget of a store, shared by the arenas of all formats. It frees slots only by asking for victims."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.errors import Refused
from kvrelay.store.arena import Arena
from kvrelay.store.geometry import slot_stride
from kvrelay.store.shelf import Shelf
from kvrelay.types import DTYPE_BYTES, LOSSY, PageFormat, SlotRef

MAX_FORMATS = 8
MAX_SLOTS = 1 << 20
_MAX_DIMENSION = 1 << 13
WARM_BYTES = 64 << 20
"""Free memory kept ready to be written: a first touch costs more than the copy, and comes at the worst moment."""
WARM_STEP_BYTES = 4 << 20
"""At a time: a thread for each small slot costs more than its first touch."""


class Room:
    """Shelves by format, and slots on them within ``budget_bytes``."""

    def __init__(self, budget_bytes: int, epoch: int) -> None:
        self.budget_bytes = budget_bytes
        self.epoch = epoch
        self.shelves: dict[PageFormat, Shelf] = {}

    def __repr__(self) -> str:
        return f"<Room {self.resident_bytes} of {self.budget_bytes} bytes, {len(self.shelves)} formats>"

    @property
    def resident_bytes(self) -> int:
        return sum(shelf.resident_bytes for shelf in self.shelves.values())

    @property
    def occupied_bytes(self) -> int:
        """Bytes of slots that are not free."""
        return sum(shelf.occupied * shelf.arena.stride for shelf in self.shelves.values())

    def shelf(self, format: PageFormat) -> Shelf:
        """The shelf of ``format``, made when it is the first of its kind. Raises ``Refused``."""
        shelf = self.shelves.get(format)
        if shelf is None:
            self._check(format)
            slots = min(MAX_SLOTS, self.budget_bytes // slot_stride(format))
            shelf = self.shelves[format] = Shelf(Arena.create(format, slots, self.epoch))
        return shelf

    def _check(self, format: PageFormat) -> None:
        parts = (format.layers, format.kv_heads, format.head_dim, format.page_tokens)
        sound = format.dtype in DTYPE_BYTES and format.lossy in (None, *LOSSY)
        if not sound or not all(0 < part <= _MAX_DIMENSION for part in parts):
            raise Refused(f"{format} is not a page format this store can hold")
        if slot_stride(format) > self.budget_bytes:
            raise Refused(f"a page of {slot_stride(format)} bytes does not fit; enlarge store.arena_bytes")
        if len(self.shelves) >= MAX_FORMATS:
            raise Refused(f"the store holds {MAX_FORMATS} page formats already; restart it to forget old ones")

    def take(self, shelf: Shelf, count: int, evict: Callable[[int], bool]) -> list[SlotRef]:
        """Up to ``count`` slots to write into.

        ``evict`` frees so many slots of the shelf, or fewer, or one of another; False when it cannot.
        """
        refs = shelf.take_warm(count)
        while (lacking := count - len(refs)) > 0:
            cold = shelf.take_cold(min(lacking, self._affordable(shelf)))
            if cold:
                refs += cold
            elif not self._cool_other(shelf) and not evict(lacking):
                break
            else:
                refs += shelf.take_warm(lacking)
        return refs

    def begin_warming(self, shelf: Shelf) -> list[int]:
        """Free slots that are to be given their memory ahead of need, a few at a time; none when enough have it."""
        stride = shelf.arena.stride
        wanted = min(WARM_BYTES, self.budget_bytes // 4) - shelf.warm_bytes
        return shelf.begin_warming(
            max(0, min(wanted, max(WARM_STEP_BYTES, stride), self.budget_bytes - self.resident_bytes)) // stride
        )

    def _affordable(self, shelf: Shelf) -> int:
        """How many more of its slots may take memory."""
        return max(0, self.budget_bytes - self.resident_bytes) // shelf.arena.stride

    def _cool_other(self, shelf: Shelf) -> bool:
        return any(other.cool() for other in self.shelves.values() if other is not shelf)

    def close(self) -> None:
        for shelf in self.shelves.values():
            shelf.close()
        self.shelves.clear()
