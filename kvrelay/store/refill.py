"""Keeps a client's stock of slots at its target. It lives on the client's loop; its work ends with the attachment."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from kvrelay.protocol.client import Allocate, Granted
from kvrelay.store.attachment import Attachment
from kvrelay.store.stock import SlotStock
from kvrelay.types import SlotRef

RETRY_S = 0.5
"""Pause before asking again for slots that a full store did not grant."""
_TOGETHER = 8
"""Slots mapped in one go, on a thread."""


class Refill:
    """Asks one attachment for slots, one question at a time."""

    def __init__(self, attachment: Attachment, stock: SlotStock) -> None:
        self._attachment = attachment
        self._stock = stock
        self._needed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Refill of {self._stock!r}>"

    def poke(self) -> None:
        """Slots were taken."""
        self._needed.set()

    async def run(self) -> None:
        """Refill until cancelled. Raises ``Lost`` with the link."""
        while True:
            while count := self._stock.missing:
                slots = await self._ask(count)
                await self._map(slots)
                if not slots:
                    await asyncio.sleep(RETRY_S)
            self._needed.clear()
            if not self._stock.missing:
                await self._needed.wait()

    async def _ask(self, count: int) -> list[SlotRef]:
        answer: Future[Granted] = Future()
        self._attachment.request(lambda id: Allocate(id=id, count=count), Granted, answer)  # type: ignore[arg-type]
        return (await asyncio.wrap_future(answer)).slots

    async def _map(self, slots: list[SlotRef]) -> None:
        """Have the slots' memory mapped before the forward thread gets them: it must not pay for first touches."""
        for start in range(0, len(slots), _TOGETHER):
            part = slots[start : start + _TOGETHER]
            await asyncio.to_thread(self._populate, part)
            self._stock.add(part)

    def _populate(self, slots: list[SlotRef]) -> None:
        self._attachment.arena.populate([ref.slot for ref in slots])
