"""Drives one request over its two legs, as the brain decides. It must never leave a leg running after ``close``, nor
hand out an answer before it is known to be one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable

from kvrelay.errors import KvrelayError, Lost, Malformed, Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import (
    AbandonDecode,
    AbandonPrefill,
    Command,
    DispatchDecode,
    Plan,
    PrefillOrder,
    Refuse,
    SendPrefill,
    Start,
)
from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.route import Path
from kvrelay.router import sse
from kvrelay.router.failures import Rejected, blames_client
from kvrelay.router.legs import decode_body, local_body, prefill_body, prefill_cached_tokens
from kvrelay.router.request import ClientRequest
from kvrelay.router.upstream import MAX_ERROR_BYTES, Reply, Upstream

log = logging.getLogger("kvrelay.router")

DRAIN_S = 0.05
SETTLE_S = 1.0
"""Longest wait for P's own count of cached tokens once D has finished."""


class Whole:
    """A complete answer."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"<Whole answer of {len(self.body)} bytes>"


class Stream:
    """An answer whose first events are here; ``blocks`` starts with them."""

    def __init__(self, blocks: AsyncIterator[bytes]) -> None:
        self.blocks = blocks

    def __repr__(self) -> str:
        return "<Stream answer>"


class Exchange:
    """One request between the brain's plan and its answer."""

    def __init__(
        self,
        brain: Brain,
        upstream: Upstream,
        clock: Callable[[], float],
        request: ClientRequest,
        *,
        request_id: str,
        model: str,
        salt: str,
        prompts: list[list[int]],
        obey: Callable[[Iterable[Command]], None],
    ) -> None:
        self._brain = brain
        self._upstream = upstream
        self._clock = clock
        self._request = request
        self._id = request_id
        self._model = model
        self._salt = salt
        self._prompts = prompts
        self._obey = obey
        self._local = True
        self._go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prefills: dict[int, asyncio.Task[int]] = {}
        self._opening: asyncio.Task[Reply] | None = None
        self._reply: Reply | None = None
        self._closed = False
        self.output_tokens = 0
        """Exact where the answer carries its usage, else the number of stream events that carry a token."""
        self.broken = False
        """The answer ended early, after its status was sent."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "decoding" if self._reply else "waiting"
        return f"<Exchange {self._id} {state}, {len(self._prefills)} prefills>"

    # ------------------------------------------------------------ commands

    def start(self, plan: Plan) -> None:
        """Send what the brain planned."""
        self._local = plan.path is Path.LOCAL
        if self._local and not plan.held:
            self._go.set_result(None)
        for order in plan.prefills:
            self._send(order)

    def obey(self, command: Command) -> None:
        """Do what the brain says."""
        match command:
            case DispatchDecode() if not self._go.done():
                self._go.set_result(None)
            case Start():
                self.start(command.plan)
            case Refuse() if not self._go.done():
                self._go.set_exception(Overloaded(command.reason, command.after_s))
            case SendPrefill():
                self._send(command.order)
            case AbandonPrefill() if (task := self._prefills.get(command.index)) is not None:
                task.cancel()
            case AbandonDecode():
                self._drop_decode()

    def _drop_decode(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._reply is not None:
            self._reply.close()

    # ------------------------------------------------------------ P legs

    def _send(self, order: PrefillOrder) -> None:
        task = asyncio.create_task(self._prefill(order))
        self._prefills[order.index] = task
        task.add_done_callback(lambda done: self._prefill_over(order.index, done))

    async def _prefill(self, order: PrefillOrder) -> int:
        """Have one prompt computed; P's cached tokens. Raises ``Rejected``, ``Lost``."""
        body = prefill_body(order, self._model, self._prompts[order.index], self._salt)
        self._brain.prefill_sent(self._id, self._clock())
        reply = await self._upstream.post(f"{order.url}/v1/completions", body, request_id=f"{self._id}-p{order.index}")
        try:
            return prefill_cached_tokens(await self._accepted(reply))
        finally:
            reply.close()

    async def _accepted(self, reply: Reply) -> bytes:
        """The body of a 200. Raises ``Rejected`` on an answer that blames the request, ``Lost`` on any other."""
        if reply.status == 200:
            return await reply.read()
        body = await reply.read(MAX_ERROR_BYTES)
        if blames_client(reply.status):
            raise Rejected(reply.status, body)
        raise Lost(f"a worker answered with status {reply.status}")

    def _prefill_over(self, index: int, task: asyncio.Task[int]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvrelayError):
            log.error("the prefill of prompt %d of %s failed", index, self._id, exc_info=error)
        if self._closed:
            return
        del self._prefills[index]
        if error is None and not task.cancelled():
            self._obey(self._brain.prefill_finished(self._id, index, task.result(), self._clock()))
        elif error is None or isinstance(error, Lost) or self._go.done():
            # Only a lost worker is to blame: a leg that was called off says nothing, nor does a request that is wrong.
            blamed = isinstance(error, Lost)
            self._obey(self._brain.prefill_failed(self._id, index, self._clock(), blamed=blamed))
        else:
            self._go.set_exception(error)

    async def _settle(self) -> None:
        """Give P's answers a moment: D may be done before P's HTTP reply is here."""
        if self._prefills:
            await asyncio.wait(self._prefills.values(), timeout=SETTLE_S)
            # Their callbacks run in the loop's next round.
            await asyncio.sleep(0)

    # ------------------------------------------------------------ D leg

    async def answer(self) -> Whole | Stream:
        """The answer, once it is known to be one. Raises ``Rejected``, ``Overloaded``."""
        await self._go
        while True:
            try:
                return await self._decode()
            except (Lost, Malformed) as error:
                self._drop_decode()
                if not self._brain.decode_refused(self._id, self._clock()):
                    raise Overloaded("no worker could answer this request; retry") from error

    async def _decode(self) -> Whole | Stream:
        order = self._brain.decode_order(self._id, self._clock())
        body = (
            local_body(self._request, self._salt)
            if self._local
            else decode_body(self._request, order, self._prompts, self._salt)
        )
        reply = self._reply = await self._open(f"{order.url}{self._request.kind.path}", body)
        if self._request.stream and reply.status == 200:
            return await self._stream(reply)
        answer = await self._accepted(reply)
        self.output_tokens = sse.completion_tokens(answer) or 0
        return Whole(await self._counted(answer))

    async def _open(self, url: str, body: bytes) -> Reply:
        self._opening = asyncio.create_task(self._upstream.post(url, body, request_id=self._id))
        try:
            return await self._opening
        except asyncio.CancelledError:
            if self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None:
                self._opening.result().close()
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise  # the client went away
            raise Lost("the decode worker left") from None
        finally:
            self._opening = None

    async def _stream(self, reply: Reply) -> Stream:
        blocks = reply.events()
        first = await anext(blocks, b"")
        if not first:
            raise Lost("a decode worker ended its stream before the first event")
        status = sse.error_status(first)
        if status is not None and blames_client(status):
            raise Rejected(status, sse.error_json(first))
        if status is not None:
            raise Lost(f"a decode worker's stream began with an error {status}")
        return Stream(self._relay(first, blocks, self._clock()))

    async def _relay(self, first: bytes, rest: AsyncIterator[bytes], first_s: float) -> AsyncIterator[bytes]:
        """Pass blocks on. A stream that breaks ends with an error event and without ``[DONE]``."""
        block, failed, told = first, False, False
        try:
            while block:
                failed = failed or sse.has_error(block)
                whole = block.endswith(sse.DONE)
                if whole and failed:
                    block = block.removesuffix(sse.DONE)
                self.output_tokens += sse.token_events(block)
                yield await self._counted(block)
                if not told:  # the client has its first token already: what the brain learns of it need not hold it up
                    told = True
                    self._obey(self._brain.first_token(self._id, first_s))
                if whole:
                    self.broken = failed
                    await self._drain(rest)
                    return
                block = await anext(rest, b"")
        except (Lost, Malformed):
            pass
        self.broken = True
        if not failed:
            yield sse.error_event("the worker that wrote this answer is gone; send the request again", 502)

    async def _drain(self, rest: AsyncIterator[bytes]) -> None:
        """Take the end of the HTTP body that follows the last event, so that the connection can be used again."""
        with contextlib.suppress(Lost, Malformed, TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await anext(rest, b"")

    async def _counted(self, block: bytes) -> bytes:
        """``block`` with P's count of cached tokens, where D's stands."""
        if sse.DETAILS not in block:
            return block
        self.output_tokens = sse.completion_tokens(block) or self.output_tokens
        if self._local:
            return block
        await self._settle()
        return sse.with_cached_tokens(block, self._brain.cached_tokens(self._id))

    # ------------------------------------------------------------ end

    def close(self, status: int) -> Timeline:
        """Drop whatever still runs and give back what was reserved. To be called exactly once."""
        self._closed = True
        for task in self._prefills.values():
            task.cancel()
        self._drop_decode()
        if not self._go.done():
            self._go.cancel()
        elif not self._go.cancelled():
            self._go.exception()  # seen, whether or not anybody waited for it
        return self._brain.finish(self._id, status=status, output_tokens=self.output_tokens, now=self._clock())
