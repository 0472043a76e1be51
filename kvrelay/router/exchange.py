"""Drives one request over its two legs, as the brain decides. It must never leave a leg running after ``close``, nor
hand out an answer before it is known to be one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable

from kvrelay.errors import Harmful, Lost, Malformed, Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import (
    AbandonDecode,
    AbandonPrefill,
    Command,
    DispatchDecode,
    Plan,
    Queued,
    Refuse,
    RejectPoison,
    SendPrefill,
    Start,
)
from kvrelay.fleet.ledger import Timeline
from kvrelay.policy.loss import LossReason
from kvrelay.policy.route import Path
from kvrelay.router import sse
from kvrelay.router.answers import StreamedAnswer, WholeAnswer
from kvrelay.router.decodes import Decodes
from kvrelay.router.failures import Rejected, blames_client, failure, loss
from kvrelay.router.job import Job
from kvrelay.router.legs import decode_body, local_body
from kvrelay.router.prefills import Prefills, accepted
from kvrelay.router.relay import Relay
from kvrelay.router.request import ClientRequest
from kvrelay.router.resumable import Remains
from kvrelay.router.stream_resumption import StreamResumption
from kvrelay.router.stream_silence import StreamSilence
from kvrelay.router.strip import without_transfer
from kvrelay.router.tap import Tap
from kvrelay.router.tokens import Tokens
from kvrelay.router.turn import Turn
from kvrelay.router.upstream import Reply, Upstream
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
        job: Job,
        remains: Remains | None,
        obey: Callable[[Iterable[Command]], None],
    ) -> None:
        """``remains``: what is left to write of an answer that may go on elsewhere; None for one that may not."""
        self._brain = brain
        self._clock = clock
        self._request = request
        self._id = job.request_id
        self._job = job
        self._obey = obey
        self._local = True
        self._turn = Turn()
        self._prefills = Prefills(brain, upstream, clock, job, obey=obey, refused=self._turn.refuse)
        self._decodes = Decodes(upstream, job.request_id)
        self._remains = remains
        self._tap = Tap(remains.journal, keeps_ids=request.has("return_token_ids")) if remains is not None else None
        self._relay: Relay | None = None
        self._written = 0
        """Tokens of the answer, as its usage says."""
        self.silence = StreamSilence(clock)
        self._resumption = self._resumption_of(tokens)

    def _resumption_of(self, tokens: Tokens) -> StreamResumption | None:
        if self._remains is None or self._tap is None:
            return None
        return StreamResumption(
            self._brain,
            self._clock,
            tokens,
            self._remains,
            self._tap,
            self._prefills,
            self._decodes,
            self._turn,
            self.silence,
            self._job,
            start=self.start,
            obey=self._obey,
        )

    def __repr__(self) -> str:
        return f"<Exchange {self._id} {'decoding' if self._decodes else 'waiting'}, {len(self._prefills)} prefills>"

    def request_status(self) -> dict[str, object]:
        """What the router does for it now, JSON-ready."""
        return {
            "decode_turn": self._turn.state,
            "prefill_calls": len(self._prefills),
            "decode_calls": len(self._decodes),
            "streams": self._relay is not None,
            "journal_tokens": self.journal_tokens,
        }

    @property
    def tenant(self) -> str:
        return self._job.tenant

    @property
    def received_s(self) -> float:
        return self._job.received_s

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
        if self._turn.is_given_up:
            return
        if self._local and not plan.held:
            self._turn.come()
        for order in plan.prefills:
            self._prefills.send(order)

    def obey(self, command: Command) -> None:
        """Do what the brain says."""
        match command:
            case DispatchDecode():
                self._turn.come()
            case Start():
                self.start(command.plan)
            case Refuse():
                self._turn.refuse(Overloaded(command.reason, command.after_s))
            case RejectPoison():
                self._turn.refuse(Harmful(command.reason))
            case SendPrefill():
                self._prefills.send(command.order)
            case AbandonPrefill():
                self._prefills.abandon(command.index)
            case AbandonDecode():
                self._abandon_decode(command)

    def _abandon_decode(self, command: AbandonDecode) -> None:
        if not command.if_resumable:
            self._decodes.abandon(command.reason)
        elif self._relay is not None and self._resumption is not None:
            self._resumption.leave(command.reason)

    def fail(self) -> None:
        """What the brain said could not be done: only this request is to suffer for it."""
        self._turn.refuse(Overloaded("the router failed at this request; retry"))
        self._decodes.drop()

    def written(self) -> tuple[PromptNames, int] | None:
        """Names of all full pages of an answer that may go on elsewhere, and its tokens; None of others."""
        begun = self._remains if self._relay is not None else None
        if begun is None or len(begun.journal.choices) != 1 or not begun.is_open:
            return None
        return begun.written()

    # ------------------------------------------------------------ D leg

    async def answer(self) -> WholeAnswer | StreamedAnswer:
        """The answer, once it is known to be one. Raises ``Rejected``, ``Retry``, ``Harmful``."""
        while True:
            await self._turn.wait()
            try:
                return await self._decode()
            except (Lost, Malformed) as error:
                self._decodes.drop()
                reason = loss(error)
                if reason is LossReason.RESET:
                    reason = self._decodes.take_reason(reason)
                again = self._brain.decode_refused(self._id, self._clock(), reason=reason)
                if isinstance(again, Queued):
                    self._turn.renew()
                self._obey(self._brain.waits.flush(self._clock()))
                if again is None:
                    raise Overloaded("no worker could answer this request; retry") from error
            finally:
                self.silence.end()

    async def _decode(self) -> WholeAnswer | StreamedAnswer:
        order = self._brain.decode_order(self._id, self._clock())
        self._decodes.take_reason(LossReason.RESET)  # of the worker before
        journaled = self._tap is not None
        body = (
            local_body(self._request, self._job.salt, journaled=journaled)
            if self._local
            else decode_body(self._request, order, self._job.prompts, self._job.salt, journaled=journaled)
        )
        self.silence.begin()
        reply = await self._decodes.open(f"{order.url}{self._request.kind.path}", body)
        if self._request.stream and reply.status == 200:
            return await self._stream(reply)
        answer = without_transfer(await self._counted(await accepted(reply)))
        self._obey(self._brain.answered(self._id, self._clock()))
        return WholeAnswer(answer)

    async def _stream(self, reply: Reply) -> StreamedAnswer:
        blocks = reply.events()
        first = await anext(blocks, b"")
        first_s = self._clock()
        if not first:
            raise Lost("a decode worker ended its stream before the first event")
        status = sse.error_status(first)
        if status is not None and blames_client(status):
            raise Rejected(status, sse.error_json(first))
        if status is not None:
            raise failure(status)
        self._relay = Relay(self._resumption, self.silence, self._counted, self._remains, self._tap)
        reply.pass_to(self._relay.pass_on)
        return StreamedAnswer(self._told(self._relay.blocks(first, blocks), first_s), self._relay.shorten)

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

    # ------------------------------------------------------------ end

    def close(self, status: int) -> Timeline:
        """Drop whatever still runs and give back what was reserved. To be called exactly once."""
        self._prefills.close()
        self._decodes.drop()
        if self._resumption is not None:
            self._resumption.close()
        self._turn.close()
        return self._brain.finish(self._id, status=status, output_tokens=self.output_tokens, now=self._clock())
