"""Passes a streamed answer on to its client, from one decode worker after the other if need be. It must never end an
answer with ``[DONE]`` that is not whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

from kvrelay.errors import Harmful, KvrelayError, Lost, Malformed, Retry
from kvrelay.policy.loss import LossReason
from kvrelay.router import sse
from kvrelay.router.answers import Outlet
from kvrelay.router.continuation import Continuation
from kvrelay.router.failures import loss
from kvrelay.router.rest import Differs
from kvrelay.router.resumable import Remains
from kvrelay.router.stream_silence import StreamSilence
from kvrelay.router.tap import Tap

log = logging.getLogger("kvrelay.router")

DRAIN_S = 0.05
_GONE = "the worker that wrote this answer is gone; send the request again"


class Lives(Protocol):
    """Finds the next decode worker for an answer that lost its own."""

    async def go_on(self, reason: LossReason) -> Continuation:
        """The rest from another worker. Raises ``KvrelayError``."""

    def resumed(self) -> None:
        """The first piece of the rest goes to the client."""

    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed for this answer."""


class Relay:
    """Passes one streamed answer to its client."""

    def __init__(
        self,
        lives: Lives | None,
        silence: StreamSilence,
        counted: Callable[[bytes], Awaitable[bytes]],
        remains: Remains | None,
        tap: Tap | None,
    ) -> None:
        """``lives``: None for an answer that goes on nowhere. ``counted`` puts the router's own count of cached tokens
        where a worker's stands; without a ``tap`` the answer ends when its worker does."""
        self._lives = lives
        self._silence = silence
        self._counted = counted
        self._remains = remains
        self._tap = tap
        self._failed = False
        self._whole = False
        self._why = _GONE
        """What the client is told when it is not whole."""
        self._outlet: Outlet | None = None
        self._is_waiting = False
        """For the next block of the first worker, and the client has all before it."""
        self.events = 0
        """Events that carried a token, of answers without a journal."""

    def __repr__(self) -> str:
        return f"<Relay {'whole' if self._whole else 'open'}, {self._tap!r}>"

    @property
    def output_tokens(self) -> int:
        if self._tap is not None and self._tap.journal.tokens:
            return self._tap.journal.tokens
        return self.events

    @property
    def broken(self) -> bool:
        """The answer ended early, after its status was sent."""
        return self._failed or not self._whole

    async def blocks(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """All events of the answer; ``first`` and ``rest`` are those of its first worker."""
        reason = LossReason.RESET
        try:
            async for block in self._first_life(first, rest):
                yield block
            reason = LossReason.GAVE_UP
        except (Lost, Malformed):
            pass
        while not self._whole and not self._failed and self._tap is not None:
            try:
                async for block in self._next_life(reason):
                    yield block
            except Differs as error:
                # It is the answer's fault, not its worker's: the next one would write the same.
                log.warning("an answer cannot go on: %s", error)
                self._tap = None
            except (Lost, Malformed) as error:
                reason = loss(error)
        if not self._whole and not self._failed:
            self._failed = True
            yield sse.error_event(self._why, 502)

    async def _first_life(self, block: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        while block:
            passed, gave_up = self._tap.take(block) if self._tap is not None else (block, False)
            self._failed = self._failed or sse.has_error(passed)
            self._whole = passed.endswith(sse.DONE)
            if self._whole and self._failed:
                passed = passed.removesuffix(sse.DONE)
            self.events += sse.token_events(passed)
            if passed:
                yield await self._counted(passed)
            if self._whole:
                await self._drain(rest)
            if self._whole or gave_up:
                return
            block = await self._next_block(rest)

    async def _next_block(self, rest: AsyncIterator[bytes]) -> bytes:
        """None of those that pass meanwhile; empty at the end. Raises ``Lost``, ``Malformed``."""
        self._silence.again()
        self._is_waiting = True
        try:
            block = await anext(rest, b"")
        finally:
            self._is_waiting = False
        self._silence.heard()
        return block

    def shorten(self, outlet: Outlet) -> None:
        """The client has the first block: those in the middle may go there without a detour."""
        self._outlet = outlet

    def pass_on(self, block: bytes) -> bool:
        """Send ``block``, which just came, at once if nobody has to think about it: no task wakes up for it then."""
        outlet = self._outlet
        if outlet is None or not self._is_waiting or not outlet.is_ready or not self._is_middle(block):
            return False
        passed = self._tap.middle(block) if self._tap is not None else block
        self.events += sse.token_events(passed)
        outlet.write(passed)
        self._silence.heard()
        self._silence.begin()
        return True

    def _is_middle(self, block: bytes) -> bool:
        if sse.DETAILS in block:
            return False
        if self._tap is not None:
            return self._tap.is_middle(block)
        return not block.endswith(sse.DONE) and not sse.has_error(block)

    async def _drain(self, rest: AsyncIterator[bytes]) -> None:
        """Take the end of the HTTP body that follows the last event, so that the connection can be used again."""
        with contextlib.suppress(Lost, Malformed, TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await anext(rest, b"")

    # ------------------------------------------------------------ other workers

    async def _next_life(self, reason: LossReason) -> AsyncIterator[bytes]:
        """What another worker adds. Raises ``Lost`` when that one is lost, too."""
        assert self._tap is not None, "what was not journaled cannot go on"
        assert self._lives is not None, "what is journaled may go on"
        if self._tap.journal.open:
            continuation = await self._went_on(reason)
            if continuation is None:
                self._tap = None
                return
            try:
                told = False
                async for block in continuation.blocks():
                    if not told:
                        told = True
                        self._lives.resumed()
                    yield block
            finally:
                continuation.close()
        yield self._ending()
        self._whole = True

    async def _went_on(self, reason: LossReason) -> Continuation | None:
        assert self._lives is not None, "what is journaled may go on"
        try:
            return await self._lives.go_on(reason)
        except (Lost, Malformed):
            raise
        except (Harmful, Retry) as error:
            self._why = str(error)
            return None
        except KvrelayError:
            return None  # a worker refuses the rest: the client has to ask again

    def _ending(self) -> bytes:
        """What follows the last token, as far as the client does not have it."""
        assert self._tap is not None, "what was not journaled cannot go on"
        assert self._remains is not None, "what is journaled is known"
        assert self._lives is not None, "what is journaled may go on"
        if not self._remains.wants_usage or self._tap.usage_sent:
            return sse.DONE
        head = msgspec.structs.asdict(self._tap.head)
        usage = {"choices": [], "usage": self._remains.usage(self._lives.cached_tokens())}
        return b"data: " + msgspec.json.encode({**head, "object": self._remains.object, **usage}) + sse.END + sse.DONE
