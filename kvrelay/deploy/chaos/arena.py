"""Stores whose slots are all in use: a client takes every slot there is and keeps it. It must give them back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvrelay.deploy.chaos.mending import Unmended, mend_each
from kvrelay.deploy.chaos.script import Deed, Target
from kvrelay.errors import Lost
from kvrelay.store.client import StoreClient
from kvrelay.types import PageFormat

_FORMAT = PageFormat(layers=1, kv_heads=1, head_dim=256, dtype="float32", page_tokens=32)
"""Pages of 64 kB: nobody else's, and the memory is all formats' together."""
_MOST_SLOTS = 1 << 20
_ATTACH_S = 2.0


class ArenaVictims:
    """Stores of this machine, by their sockets."""

    def __init__(self, sockets: Sequence[Path], key: bytes) -> None:
        self._sockets = {str(path): path for path in sockets}
        self._key = key
        self._hogs: dict[str, StoreClient] = {}

    def __repr__(self) -> str:
        return f"<ArenaVictims {list(self._sockets)}, {len(self._hogs)} full>"

    async def targets(self) -> list[Target]:
        return [Target(name=name, kind="store", deeds=(Deed.FULL_ARENA,)) for name in self._sockets]

    async def begin(self) -> None: ...

    async def hurt(self, name: str, deed: Deed) -> None:
        if name in self._hogs:
            raise Lost(f"the store at {name} is full already")
        hog = StoreClient(self._sockets[name], self._key, owner="chaos/0", format=_FORMAT, grant_slots=_MOST_SLOTS)
        self._hogs[name] = hog
        hog.start()
        if not await asyncio.to_thread(hog.wait_attached, _ATTACH_S):
            raise Lost(f"no store answers at {name}: {hog.problem}")

    async def mend(self, name: str) -> None:
        if name in self._hogs:
            await asyncio.to_thread(self._hogs[name].close)
            del self._hogs[name]

    async def end(self) -> list[Unmended]:
        return await mend_each(self._hogs, self.mend, lambda name: f"start the store at {name} again")
