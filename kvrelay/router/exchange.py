"""Drives one request over its two legs, as the brain decides. It must never leave a leg running after ``close``, nor
hand out an answer before it is known to be one."""

from __future__ import annotations

import asyncio
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
    Refuse,
    SendPrefill,
    Start,
    Waits,
)
from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.route import Path
from kvrelay.router import sse
from kvrelay.router.answers import Stream, Whole
from kvrelay.router.continuation import Continuation, RestOfChoice, rests_of
from kvrelay.router.failures import Rejected, blames_client
from kvrelay.router.legs import decode_body, local_body
from kvrelay.router.prefills import Prefills, accepted
from kvrelay.router.relay import Relay
from kvrelay.router.request import ClientRequest
from kvrelay.router.resumable import Remains
from kvrelay.router.tap import Tap
from kvrelay.router.tokens import Tokens
from kvrelay.router.upstream import Call, Reply, Upstream
from kvrelay.router.wait import Wait
from kvrelay.types import PromptNames

log = logging.getLogger("kvrelay.router")


class Exchange:
    """One request between the brain's plan and its answer."""

    def __init__(
        self,
        brain: Brain,
        upstream: Upstream,
        clock: Callable[[], float],
        request: ClientRequest,
        tokens: Tokens,
        *,
        request_id: str,
        model: str,
        salt: str,
        prompts: list[list[int]],
        remains: Remains | None,
        obey: Callable[[Iterable[Command]], None],
    ) -> None:
        """``remains``: what is left to write of an answer that may go on elsewhere; None for one that may not."""
        self._brain = brain
        self._upstream = upstream
        self._clock = clock
        self._request = request
        self._tokens = tokens
        self._id = request_id
        self._salt = salt
        self._prompts = prompts
        self._obey = obey
        self._local = True
        self._go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prefills = Prefills(
            brain,
            upstream,
            clock,
            request_id=request_id,
            model=model,
            salt=salt,
            prompts=prompts,
            obey=obey,
            refused=self._refused,
        )
        self._opening: Call | None = None
        self._replies: list[Reply] = []
        self._continuation: Continuation | None = None
        self._remains = remains
        self._tap = Tap(remains.journal, keeps_ids=request.has("return_token_ids")) if remains is not None else None
        self._relay: Relay | None = None
        self._abandoned = ""
        """Why the brain gave D up."""
        self._moving: asyncio.Task[None] | None = None
        self._planned = False
        """The D that writes on was found before the present one was left; its prefills and pulls are under way."""
        self._lost_s = 0.0
        """Since when the client waits for the next piece."""
        self._written = 0
        """Tokens of the answer, as its usage says."""
        self.wait = Wait(clock)

    def __repr__(self) -> str:
        state = "decoding" if self._replies else "waiting"
        return f"<Exchange {self._id} {state}, {len(self._prefills)} prefills>"

    @property
    def output_tokens(self) -> int:
        """Exact where the answer carries its usage or is journaled, else the number of its events with a token."""
        return self._written or (self._relay.output_tokens if self._relay is not None else 0)

    @property
    def broken(self) -> bool:
        """The answer ended early, after its status was sent."""
        return self._relay is not None and self._relay.broken

    @property
    def journal_tokens(self) -> int:
        """Tokens that are kept to go on from."""
        return self._remains.journal.tokens if self._remains is not None else 0

    # ------------------------------------------------------------ commands

    def start(self, plan: Plan) -> None:
        """Send what the brain planned."""
        self._local = plan.path is Path.LOCAL
        if self._is_given_up:
            return
        if self._local and not plan.held and not self._go.done():
            self._go.set_result(None)
        for order in plan.prefills:
            self._prefills.send(order)

    @property
    def _is_given_up(self) -> bool:
        """Its client hung up while it waited, or was told that nobody will answer."""
        return self._go.cancelled() or (self._go.done() and self._go.exception() is not None)

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
                self._prefills.send(command.order)
            case AbandonPrefill():
                self._prefills.abandon(command.index)
            case AbandonDecode() if command.if_resumable:
                self._leave_decode(command.reason)
            case AbandonDecode():
                self._abandoned = command.reason
                self._drop_decode()

    @property
    def _can_go_on(self) -> bool:
        """The answer has begun, and another D could write on."""
        remains = self._remains if self._relay is not None else None
        return remains is not None and bool(remains.journal.open) and remains.can_go_on

    def fail(self) -> None:
        """What the brain said could not be done: only this request is to suffer for it."""
        self._refused(Overloaded("the router failed at this request; retry"))
        self._drop_decode()

    def written(self) -> tuple[PromptNames, int] | None:
        """Names of all pages of an answer that may go on elsewhere, and their tokens; None of others."""
        if not self._can_go_on or self._remains is None or len(self._remains.journal.choices) != 1:
            return None
        return self._remains.written()

    def _refused(self, error: KvrelayError) -> bool:
        """A prompt is refused: so is the request, unless D is asked already."""
        if not self._go.done():
            self._go.set_exception(error)
            return True
        return False

    def _drop_decode(self) -> None:
        if self._opening is not None:
            self._opening.abandon()
        for reply in self._replies:
            reply.close()

    # ------------------------------------------------------------ D leg

    async def answer(self) -> Whole | Stream:
        """The answer, once it is known to be one. Raises ``Rejected``, ``Overloaded``."""
        await self._go
        while True:
            try:
                return await self._decode()
            except (Lost, Malformed) as error:
                self._drop_decode()
                has_next = self._brain.decode_refused(self._id, self._clock())
                self._obey(self._brain.waits.flush(self._clock()))
                if not has_next:
                    raise Overloaded("no worker could answer this request; retry") from error
            finally:
                self.wait.end()

    async def _decode(self) -> Whole | Stream:
        order = self._brain.decode_order(self._id, self._clock())
        self._abandoned = ""
        journaled = self._tap is not None
        body = (
            local_body(self._request, self._salt, journaled=journaled)
            if self._local
            else decode_body(self._request, order, self._prompts, self._salt, journaled=journaled)
        )
        self.wait.begin()
        reply = await self._open(f"{order.url}{self._request.kind.path}", body)
        self._replies = [reply]
        if self._request.stream and reply.status == 200:
            return await self._stream(reply)
        answer = await self._counted(await accepted(reply))
        self._obey(self._brain.answered(self._id, self._clock()))
        return Whole(answer)

    async def _open(self, url: str, body: bytes, ending: str = "") -> Reply:
        self._opening = self._upstream.call(url, body, request_id=self._id + ending)
        try:
            return await self._opening.reply()
        finally:
            self._opening = None

    async def _stream(self, reply: Reply) -> Stream:
        blocks = reply.events()
        first = await anext(blocks, b"")
        first_s = self._clock()
        if not first:
            raise Lost("a decode worker ended its stream before the first event")
        status = sse.error_status(first)
        if status is not None and blames_client(status):
            raise Rejected(status, sse.error_json(first))
        if status is not None:
            raise Lost(f"a decode worker's stream began with an error {status}")
        self._relay = Relay(self, self.wait, self._counted, self._remains, self._tap)
        reply.pass_to(self._relay.pass_on)
        return Stream(self._told(self._relay.blocks(first, blocks), first_s), self._relay.shorten)

    async def _told(self, blocks: AsyncIterator[bytes], first_s: float) -> AsyncIterator[bytes]:
        told = False
        async for block in blocks:
            yield block
            if not told:  # the client has its first token already: what the brain learns of it need not hold it up
                told = True
                self._obey(self._brain.first_token(self._id, first_s))

    async def _counted(self, block: bytes) -> bytes:
        """``block`` with P's count of cached tokens, where D's stands."""
        if sse.DETAILS not in block:
            return block
        self._written = sse.completion_tokens(block) or self._written
        if self._local:
            return block
        await self._prefills.settle()
        return sse.with_cached_tokens(block, self._brain.cached_tokens(self._id))

    # ------------------------------------------------------------ another D writes the rest

    def _leave_decode(self, reason: str) -> None:
        """D is there and writes: it is left once another one is found that writes on at once."""
        if self._moving is None and self._can_go_on and not self._lost_s:
            self._moving = asyncio.create_task(self._move(reason))
            self._moving.add_done_callback(self._moved)

    async def _move(self, reason: str) -> None:
        assert self._remains is not None, "only what is journaled goes on"
        assert self._tap is not None, "only what is journaled goes on"
        if not await rests_of(self._remains, self._tap, self._tokens):
            return
        if not self._can_go_on or self._lost_s:
            return  # it came to its end meanwhile, or was lost
        open_choices = self._remains.journal.open
        rest = self._remains.rest(open_choices)
        plan = self._brain.recovery.hand_over(self._id, rest, reason=reason, now=self._clock())
        if plan is not None:
            self._planned, self._go = True, asyncio.get_running_loop().create_future()
            self._drop_decode()
            # Not when the client has read so far: it may be slow, and what the brain counts on must be under way.
            self._begin(plan, open_choices)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the answer of %s could not be moved", self._id, exc_info=error)

    async def go_on(self, reason: str) -> Continuation | None:
        """The rest of the answer from another D; None when there is none. Raises ``Lost``, ``Malformed``, ..."""
        assert self._remains is not None, "only what is journaled goes on"
        assert self._tap is not None, "only what is journaled goes on"
        self._lost_s = self.wait.since_s or self._lost_s or self._clock()
        self.wait.end()
        self._drop_decode()
        reason, self._abandoned = self._abandoned or reason, ""
        rests = await rests_of(self._remains, self._tap, self._tokens)
        if not self._is_next_found([rest.index for rest in rests], reason):
            return None
        await self._go
        self._replies = []
        for rest in rests:
            self._replies.append(await self._open_rest(rest))
        self._continuation = Continuation(list(zip(rests, self._replies, strict=True)), self.wait)
        return self._continuation

    def _is_next_found(self, open_choices: list[int], reason: str) -> bool:
        """Whether these choices go on, now or when their turn comes; what they wait for is under way then."""
        assert self._remains is not None, "only what is journaled goes on"
        planned, self._planned = self._planned, False
        if planned and open_choices:
            return True
        self._go = asyncio.get_running_loop().create_future()
        now = self._clock()
        plan = self._brain.recovery.lost(self._id, self._remains.rest(open_choices), reason=reason, now=now)
        if plan is not None:
            self._begin(plan, open_choices)
        self._obey(self._brain.waits.flush(now))
        return plan is not None

    def _begin(self, plan: Plan | Waits, open_choices: list[int]) -> None:
        """Have done what these choices, cut off here, wait for before they go on."""
        assert self._remains is not None, "only what is journaled goes on"
        self._prefills.renew([self._remains.rest_of(index) for index in open_choices])
        if isinstance(plan, Plan):
            self.start(plan)
            self._obey(plan.pulls)

    async def _open_rest(self, rest: RestOfChoice) -> Reply:
        """Raises ``Lost``, ``Rejected``, ``Overloaded``."""
        assert self._remains is not None, "only what is journaled goes on"
        order = self._brain.decode_order(self._id, self._clock())
        body = self._remains.body(rest.index, order, self._salt)
        self.wait.begin()
        reply = await self._open(f"{order.url}{self._request.kind.path}", body, f"-r{rest.index}")
        if reply.status != 200:
            self._replies.append(reply)
            await accepted(reply)
        return reply

    def resumed(self) -> None:
        """The first piece of the rest goes to the client."""
        now = self._clock()
        self._obey(self._brain.recovery.resumed(self._id, now - self._lost_s, now))
        self._lost_s = 0.0

    def cached_tokens(self) -> int | None:
        return self._brain.cached_tokens(self._id)

    # ------------------------------------------------------------ end

    def close(self, status: int) -> Timeline:
        """Drop whatever still runs and give back what was reserved. To be called exactly once."""
        self._prefills.close()
        self._drop_decode()
        if self._moving is not None:
            self._moving.cancel()
        if self._continuation is not None:
            self._continuation.close()
        if not self._go.done():
            self._go.cancel()
        elif not self._go.cancelled():
            self._go.exception()  # seen, whether or not anybody waited for it
        return self._brain.finish(self._id, status=status, output_tokens=self.output_tokens, now=self._clock())
