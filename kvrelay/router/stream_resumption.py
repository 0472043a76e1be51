"""The lives of a streamed answer after its first: another decode worker writes the rest, since the one before was lost
or is to become empty. It must never leave a worker that writes before the next one is found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from kvrelay.errors import Exhausted, Unasked
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Command, Plan, Queued
from kvrelay.policy.loss import LossReason
from kvrelay.router.continuation import Continuation, RestOfChoice, rests_of
from kvrelay.router.decodes import Decodes
from kvrelay.router.job import Job
from kvrelay.router.prefills import Prefills, accepted
from kvrelay.router.resumable import Remains
from kvrelay.router.stream_silence import StreamSilence
from kvrelay.router.tap import Tap
from kvrelay.router.tokens import Tokens
from kvrelay.router.turn import Turn
from kvrelay.router.upstream import Reply

log = logging.getLogger("kvrelay.router")

EXHAUSTED_S = 10.0
"""Longest wait for a descriptor of this router's own: its client would have to ask for all of the answer again."""
EXHAUSTED_PAUSE_S = 0.1


class StreamResumption:
    """Lets the streamed answer of one request go on at another decode worker."""

    def __init__(
        self,
        brain: Brain,
        clock: Callable[[], float],
        tokens: Tokens,
        remains: Remains,
        tap: Tap,
        prefills: Prefills,
        decodes: Decodes,
        turn: Turn,
        silence: StreamSilence,
        job: Job,
        *,
        start: Callable[[Plan], None],
        obey: Callable[[Iterable[Command]], None],
    ) -> None:
        """``start`` does what a plan says."""
        self._brain = brain
        self._clock = clock
        self._tokens = tokens
        self._remains = remains
        self._tap = tap
        self._prefills = prefills
        self._decodes = decodes
        self._turn = turn
        self._silence = silence
        self._id = job.request_id
        self._salt = job.salt
        self._start = start
        self._obey = obey
        self._moving: asyncio.Task[None] | None = None
        """From the life that is written now: the next one has nothing to do with it."""
        self._to_leave: tuple[str, LossReason] | None = None
        """A worker that was to be left before it wrote anything, and why."""
        self._is_moved = False
        """The next worker was found before the present one was left; its prefills and pulls are under way."""
        self._lost_s = 0.0
        """Since when the client waits for the next piece."""
        self._continuation: Continuation | None = None

    def __repr__(self) -> str:
        return f"<StreamResumption of {self._id}, {self._remains!r}>"

    # ------------------------------------------------------------ from one that writes

    def leave(self, reason: LossReason) -> None:
        """The present worker is there and writes: it is left once another one is found that writes on at once."""
        if self._lost_s:
            self._to_leave = self._brain.recovery.decode_worker(self._id), reason
        elif self._moving is None and self._remains.is_open:
            self._moving = asyncio.create_task(self._move(reason))
            self._moving.add_done_callback(self._moved)

    async def _move(self, reason: LossReason) -> None:
        if not await rests_of(self._remains, self._tap, self._tokens):
            return
        open_choices = self._tap.journal.open  # with what was taken meanwhile
        if not self._remains.is_open:
            return
        rest = self._remains.rest(open_choices)
        plan = self._brain.recovery.hand_over(self._id, rest, reason=reason, now=self._clock())
        if plan is not None:
            self._is_moved = True
            self._turn.renew()
            self._decodes.drop()
            self._begin_early(plan, open_choices)

    def _begin_early(self, plan: Plan, open_choices: list[int]) -> None:
        """Begin the prefills and pulls of ``plan`` at once, not when the client has read so far: it may be slow, and
        the brain counts on them."""
        with contextlib.ExitStack() as unless_begun:
            # What its turn depends on may never be done.
            unless_begun.callback(self._turn.refuse, Unasked("the answer could not be moved"))
            self._begin(plan, open_choices)
            unless_begun.pop_all()

    def _moved(self, task: asyncio.Task[None]) -> None:
        if self._moving is task:
            self._moving = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the answer of %s could not be moved", self._id, exc_info=error)

    def _stay(self) -> None:
        """No move that is being prepared is made any more."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()

    # ------------------------------------------------------------ the client has all of the life before

    async def go_on(self, reason: LossReason) -> Continuation:
        """The rest of the answer from another worker. Raises ``KvrelayError``."""
        self._lost_s = self._silence.since_s or self._lost_s or self._clock()
        self._silence.leave()
        self._stay()
        self._decodes.drop()
        reason = self._decodes.take_reason(reason)
        rests = await rests_of(self._remains, self._tap, self._tokens)
        self._find_next([rest.index for rest in rests], reason)
        await self._turn.wait()
        legs = [(rest, await self._open_rest(rest)) for rest in rests]
        self._continuation = Continuation(legs, self._silence)
        return self._continuation

    def _find_next(self, open_choices: list[int], reason: LossReason) -> None:
        """These choices go on, now or when their turn comes; what they wait for is under way. Raises ``Harmful``,
        ``Overloaded``."""
        is_moved, self._is_moved = self._is_moved, False
        if is_moved and open_choices:
            return
        self._turn.renew()
        now = self._clock()
        try:
            plan = self._brain.recovery.lost(self._id, self._remains.rest(open_choices), reason=reason, now=now)
            self._begin(plan, open_choices)
        finally:
            self._obey(self._brain.waits.flush(now))

    def _begin(self, plan: Plan | Queued, open_choices: list[int]) -> None:
        """Have done what these choices, cut off here, wait for before they go on."""
        self._prefills.renew([self._remains.rest_of(index) for index in open_choices])
        if isinstance(plan, Plan):
            self._start(plan)
            self._obey(plan.pulls)

    async def _open_rest(self, rest: RestOfChoice) -> Reply:
        """Raises ``Lost``, ``Rejected``, ``Overloaded``, ``Exhausted``."""
        order = self._brain.decode_order(self._id, self._clock())
        if not self._decodes:
            # Of the worker before, which may be given up again while this one is awaited.
            self._decodes.take_reason(LossReason.RESET)
        body = self._remains.body(rest.index, order, self._salt)
        reply = await self._opened(f"{order.url}{self._remains.request.kind.path}", body, f"-r{rest.index}")
        if reply.status != 200:
            await accepted(reply)
        return reply

    async def _opened(self, url: str, body: bytes, ending: str) -> Reply:
        """Raises ``Lost``, and ``Exhausted`` when this router finds no descriptor for long."""
        until_s = self._clock() + EXHAUSTED_S
        while True:
            self._silence.begin()
            try:
                return await self._decodes.open(url, body, ending)
            except Exhausted:
                self._silence.end()  # nobody was asked
                if self._clock() >= until_s:
                    raise
            await asyncio.sleep(EXHAUSTED_PAUSE_S)

    def resumed(self) -> None:
        """The first piece of the rest goes to the client."""
        now = self._clock()
        self._obey(self._brain.recovery.resumed(self._id, now - self._lost_s, now))
        self._lost_s = 0.0
        to_leave, self._to_leave = self._to_leave, None
        if to_leave is not None and to_leave[0] == self._brain.recovery.decode_worker(self._id):
            self.leave(to_leave[1])

    def cached_tokens(self) -> int | None:
        return self._brain.cached_tokens(self._id)

    def close(self) -> None:
        """Nobody reads the answer any more."""
        self._stay()
        if self._continuation is not None:
            self._continuation.close()
