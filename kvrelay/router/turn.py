"""When a request's decode worker may be asked: at once, when its prompts are computed, or never. It is a latch; the
brain says when."""

from __future__ import annotations

import asyncio


class Turn:
    """One request's, in each of its lives."""

    def __init__(self) -> None:
        self._come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Turn {'given up' if self.is_given_up else 'come' if self._come.done() else 'awaited'}>"

    async def wait(self) -> None:
        """Until it has come. Raises what it was refused with."""
        await self._come

    def come(self) -> None:
        """Go on now. Whoever hung up meanwhile does not."""
        if not self._come.done():
            self._come.set_result(None)

    def refuse(self, error: Exception) -> bool:
        """It will not come; False when it has."""
        if self._come.done():
            return False
        self._come.set_exception(error)
        return True

    @property
    def is_given_up(self) -> bool:
        """Its client hung up while it waited, or was told that nobody will answer."""
        return self._come.cancelled() or (self._come.done() and self._come.exception() is not None)

    def renew(self) -> None:
        """Another life begins, with a turn of its own."""
        self.close()
        self._come = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Nobody waits any more."""
        if not self._come.done():
            self._come.cancel()
        elif not self._come.cancelled():
            self._come.exception()  # seen, whether or not anybody waited for it
