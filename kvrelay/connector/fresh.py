"""Pages that this engine wrote lately, so that requests that share a prefix do not write it once each.

A request's own search may be older than another's saves. Nothing is remembered here that the arena does not confirm.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvrelay.store.arena import Arena
from kvrelay.types import PageName, SlotRef

MAX_PAGES = 8192
"""Prefixes of 256k tokens: more than all requests of one engine share at a time."""


class FreshPages:
    """Slots by page name, for the arena that is looked at now."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._slots: OrderedDict[PageName, SlotRef] = OrderedDict()

    def __repr__(self) -> str:
        return f"<FreshPages {len(self._slots)}>"

    def look_at(self, arena: Arena | None) -> None:
        """Steps from now on write to ``arena``; of another one nothing holds."""
        if arena is not self._arena:
            self._arena = arena
            self._slots.clear()

    def add(self, name: PageName, slot: SlotRef) -> None:
        """``slot`` is being filled as ``name``."""
        self._slots[name] = slot
        if len(self._slots) > MAX_PAGES:
            self._slots.popitem(last=False)

    def forget(self, names: Iterable[PageName]) -> None:
        """These pages turned out unusable."""
        for name in names:
            self._slots.pop(name, None)

    def has(self, name: PageName) -> bool:
        """Whether the page is whole or on its way: its slot was neither given away nor given up."""
        slot = self._slots.get(name)
        if slot is None or self._arena is None:
            return False
        if self._arena.is_failed(slot):
            del self._slots[name]
            return False
        return True
