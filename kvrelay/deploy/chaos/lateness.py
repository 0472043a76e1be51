"""How long this process was held up at most, by its own work or by others on its machine: whatever it takes the time of
seems to pause as long. It must never take more than a moment itself."""

from __future__ import annotations

import asyncio
from types import TracebackType

EVERY_S = 0.1


class Lateness:
    """Looks at the clock inside of ``async with``."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Lateness of {self.worst_s:.3f} s>"

    async def __aenter__(self) -> Lateness:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.worst_s = max(self.worst_s, clock() - due_s)
