"""The P legs of one request. It must never leave one running after ``close``, nor take the answer of a leg that was
called off for that of the one that took its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvrelay.errors import KvrelayError, Lost
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Command, PrefillOrder
from kvrelay.router.failures import Rejected, blames_client, failure, loss
from kvrelay.router.job import Job
from kvrelay.router.legs import prefill_body, prefill_cached_tokens
from kvrelay.router.upstream import MAX_ERROR_BYTES, Reply, Upstream

log = logging.getLogger("kvrelay.router")

SETTLE_S = 1.0
"""Longest wait for P's own count of cached tokens once D has finished."""


class Prefills:
    """Sends them and tells the brain how they end."""

    def __init__(
        self,
        brain: Brain,
        upstream: Upstream,
        clock: Callable[[], float],
        job: Job,
        *,
        obey: Callable[[Iterable[Command]], None],
        refused: Callable[[KvrelayError], bool],
    ) -> None:
        """``refused`` takes an error that is the request's own, before anything of the answer was written; false when D
        is asked already."""
        self._brain = brain
        self._upstream = upstream
        self._clock = clock
        self._id = job.request_id
        self._job = job
        self._prompts = job.prompts
        """Prompts of the present part of the answer."""
        self._obey = obey
        self._refused = refused
        self._running: dict[int, asyncio.Task[None]] = {}
        self._lives = 0

    def __repr__(self) -> str:
        return f"<Prefills of {self._id}, {len(self._running)} running>"

    def __len__(self) -> int:
        return len(self._running)

    def send(self, order: PrefillOrder) -> None:
        task = asyncio.create_task(self._serve(order))
        self._running[order.index] = task
        asked_s = self._clock()
        task.add_done_callback(lambda done: self._over(order, asked_s, done))

    def abandon(self, index: int) -> None:
        if (task := self._running.get(index)) is not None:
            task.cancel()

    def renew(self, prompts: list[list[int]]) -> None:
        """Compute ``prompts`` from now on. Legs that still run are ended: the brain does not count on them any more."""
        self.close()
        self._prompts = prompts
        self._lives += 1

    async def _serve(self, order: PrefillOrder) -> None:
        """Have one prompt computed, and say so at once: D waits for it. Raises ``Rejected``, ``Lost``,
        ``Exhausted``."""
        cached_tokens = await self._prefill(order)
        if self._running.get(order.index) is asyncio.current_task():
            del self._running[order.index]
            self._obey(self._brain.prefill_finished(self._id, order.index, cached_tokens, self._clock()))

    async def _prefill(self, order: PrefillOrder) -> int:
        """Have one prompt computed; P's cached tokens. Raises ``Rejected``, ``Lost``, ``Exhausted``."""
        body = prefill_body(order, self._job.model, self._prompts[order.index], self._job.salt)
        self._brain.prefill_sent(self._id, self._clock())
        name = f"{self._id}-{'r' * self._lives}p{order.index}"
        reply = await self._upstream.post(f"{order.url}/v1/completions", body, request_id=name)
        try:
            return prefill_cached_tokens(await accepted(reply))
        finally:
            reply.close()

    def _over(self, order: PrefillOrder, asked_s: float, task: asyncio.Task[None]) -> None:
        """It failed, or its success is told already."""
        index = order.index
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvrelayError):
            log.error("the prefill of prompt %d of %s failed", index, self._id, exc_info=error)
        if self._running.get(index) is not task:
            return
        del self._running[index]
        if isinstance(error, Rejected):
            self._brain.outcomes.prefill_answered(order.worker, order.transfer, asked_s)
        # A client that has a part of its answer is not told that it asked wrongly: D may compute the rest itself.
        if not self._lives and isinstance(error, KvrelayError) and not isinstance(error, Lost) and self._refused(error):
            return
        # Only a lost worker is to blame: a leg that was called off says nothing, nor does a request that is wrong.
        blamed = isinstance(error, Lost)
        reason = loss(error) if isinstance(error, Lost) else None
        self._obey(self._brain.prefill_failed(self._id, index, self._clock(), blamed=blamed, reason=reason))

    async def settle(self) -> None:
        """Give P's answers a moment: D may be done before P's HTTP reply is here."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=SETTLE_S)
            # Failures are told in the loop's next round.
            await asyncio.sleep(0)

    def close(self) -> None:
        """Call all of them off, without a word to the brain."""
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()


async def accepted(reply: Reply) -> bytes:
    """The body of a 200. Raises ``Rejected`` on an answer that blames the request, ``Unasked`` where it says that the
    worker never tried, ``Failing`` on a 500: an engine that dies answers what it had so."""
    if reply.status == 200:
        return await reply.read()
    body = await reply.read(MAX_ERROR_BYTES)
    if blames_client(reply.status):
        raise Rejected(reply.status, body)
    raise failure(reply.status)
