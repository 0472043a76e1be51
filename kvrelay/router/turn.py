"""A latch that says when a request's decode worker may be asked: at once, when its prompts are computed, or never. The
brain opens it."""

from __future__ import annotations

import asyncio


class Turn:
    """The turn of one request, renewed whenever its answer goes on elsewhere."""

    def __init__(self) -> None:
        self._come: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Turn {self.state}>"

    @property
    def state(self) -> str:
        """``awaited``, ``come`` or ``given up``."""
        return "given up" if self.is_given_up else "come" if self._come.done() else "awaited"

    async def wait(self) -> None:
        """Wait until the turn has come. Raises the error that it was refused with."""
        await self._come

    def come(self) -> None:
        """The decode worker may be asked now, unless the client hung up meanwhile."""
        if not self._come.done():
            self._come.set_result(None)

    def refuse(self, error: Exception) -> bool:
        """The turn will not come; False when it has come already."""
        if self._come.done():
            return False
        self._come.set_exception(error)
        return True

    @property
    def is_given_up(self) -> bool:
        """Whether the client hung up while it waited, or was told that no worker will answer."""
        return self._come.cancelled() or (self._come.done() and self._come.exception() is not None)

    def renew(self) -> None:
        """The answer goes on elsewhere: wait for another turn."""
        self.close()
        self._come = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """The request waits no more."""
        if not self._come.done():
            self._come.cancel()
        elif not self._come.cancelled():
            self._come.exception()  # seen, whether or not anybody waited for it
