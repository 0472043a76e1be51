"""All exchanges in progress: opens them with the brain's plan, passes the brain's commands on, closes them. It must
never decide anything."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable

import msgspec

from kvrelay.errors import BadRequest, Overloaded
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, Command, Plan, PullPages, Start
from kvrelay.identity import root_name
from kvrelay.policy.admit import RETRY_AFTER_S, Slo
from kvrelay.policy.recover import Manner
from kvrelay.policy.whole import WholeReason
from kvrelay.protocol.feed import TransferEvent
from kvrelay.router.context import Ready, ReadyWorkers, check_length, demanded_tokens
from kvrelay.router.defaults import Defaults
from kvrelay.router.exchange import Exchange
from kvrelay.router.job import Job
from kvrelay.router.keys import Tenant
from kvrelay.router.naming import Naming, Roots
from kvrelay.router.prompts import Prompts, may_fit
from kvrelay.router.request import ClientRequest
from kvrelay.router.resumable import Remains, manner_of
from kvrelay.router.switchboard import Switchboard
from kvrelay.router.telemetry import Telemetry
from kvrelay.router.tokens import Tokens
from kvrelay.router.upstream import Upstream
from kvrelay.types import CLIENT_CLOSED, Fingerprint, PageName, RequestFacts, Stage

log = logging.getLogger("kvrelay.router")

COPY_EVERY_S = 1.0
"""How often running answers are looked at for pages to copy: naming them takes some microseconds each."""

MAX_RUNNING_TOLD = 1024
"""Requests of one listing: everything else stands still while it is told what each of them waits for."""
MAX_ROOTS = 4096
"""Roots of page names that are remembered: one for each tenant and kind of worker."""


class Desk:
    """Where requests become exchanges."""

    def __init__(
        self,
        brain: Brain,
        upstream: Upstream,
        telemetry: Telemetry,
        clock: Callable[[], float],
        switchboard: Switchboard,
        tokens: Tokens,
        *,
        resumes: bool = True,
        defaults: Defaults | None = None,
    ) -> None:
        """``resumes``: answers whose D is lost go on from another one. ``defaults``: the model's own."""
        self._switchboard = switchboard
        self._brain = brain
        self._upstream = upstream
        self._telemetry = telemetry
        self._clock = clock
        self._tokens = tokens
        self._resumes = resumes
        self._defaults = defaults or Defaults()
        self._open: dict[str, Exchange] = {}
        self._known_roots: dict[tuple[PageName, str], PageName] = {}
        """Salted roots, by kind and salt: to hash one anew takes as long as to name a short prompt."""
        self._ready = ReadyWorkers(brain.fleet)
        self._looked_s = 0.0

    def __repr__(self) -> str:
        return f"<Desk {len(self._open)} exchanges>"

    def ready(self, model: str | None) -> Ready:
        """Workers of ``model``, or of the only one, if none is named. Raises ``BadRequest``, ``Overloaded``."""
        models = self._brain.fleet.models()
        if not models:
            raise Overloaded("no worker is ready; retry, or look at /health for why", RETRY_AFTER_S)
        known = ", ".join(models)
        if model is None and len(models) > 1:
            raise BadRequest(f"name a model; this router serves {known}", param="model")
        if model is not None and model not in models:
            message = f"the model {model[:200]!r} does not exist; this router serves {known}"
            raise BadRequest(message, status=404, param="model")
        ready = self._ready.of(model or models[0], self._clock())
        if not ready.workers:
            raise Overloaded("no worker of this model is ready; retry, or look at /health for why", RETRY_AFTER_S)
        return ready

    def open(
        self,
        request: ClientRequest,
        prompts: Prompts,
        ready: Ready,
        *,
        request_id: str,
        tenant: Tenant,
        slo: Slo,
        received_s: float,
    ) -> Exchange:
        """Plan and start a request: everything is reserved when this returns. Raises ``BadRequest``, ``Overloaded``."""
        worker, context_tokens = ready.workers[0], ready.context_tokens
        if max(request.max_tokens or 0, *prompts.lengths) > context_tokens:
            check_length(request, prompts, self._brain.fleet.longest_context(worker.model))
        naming = Naming(functools.partial(self._roots, worker.model, tenant.salt), context_tokens)
        sequences = request.choices * len(prompts.lengths)
        ask = Ask(
            facts=RequestFacts(
                request_id=request_id,
                model=worker.model,
                prompt_tokens=prompts.lengths,
                max_tokens=sequences * self._room_tokens(request, max(prompts.lengths), context_tokens),
                page_names=naming.of(prompts.ids),
            ),
            sequences=sequences,
            local_reason=prompts.whole or "",
            tenant=tenant.name,
            received_s=received_s,
            tokenised_s=self._clock(),
            slo=slo,
            in_one_piece=not request.stream,
            context_tokens=demanded_tokens(request, prompts, self._context_tokens(request, prompts, ready)),
        )
        job = Job(
            request_id=request_id,
            tenant=tenant.name,
            received_s=received_s,
            model=worker.model,
            salt=tenant.salt,
            prompts=prompts.ids,
        )
        return self._begun(request, ask, job, self._remains(request, ask, prompts, naming, ready))

    def _context_tokens(self, request: ClientRequest, prompts: Prompts, ready: Ready) -> int:
        """Where what may be demanded ends: of a text that surely takes more than ready workers can, where another one
        that is away for now can."""
        if prompts.whole is WholeReason.OVER_LENGTH:
            longest = self._brain.fleet.longest_context(ready.workers[0].model)
            if may_fit(request, longest, self._tokens):
                return longest
        return ready.context_tokens

    def _begun(self, request: ClientRequest, ask: Ask, job: Job, remains: Remains | None) -> Exchange:
        """Nothing is kept of a request that the brain has no room for. Raises ``Overloaded``."""
        try:
            plan = self._brain.begin(ask, self._clock())
        except Overloaded:
            self._count(job.request_id)
            raise
        exchange = self._open[job.request_id] = Exchange(
            self._brain, self._upstream, self._clock, request, self._tokens, job, remains, self.obey
        )
        if isinstance(plan, Plan):
            exchange.start(plan)
            self.obey(plan.pulls)
        return exchange

    def _count(self, request_id: str) -> None:
        """A request that was refused at once is a failure like any other."""
        if (timeline := self._brain.ledger.get(request_id)) is not None:
            self._telemetry.observe(timeline)

    def _remains(
        self, request: ClientRequest, ask: Ask, prompts: Prompts, naming: Naming, ready: Ready
    ) -> Remains | None:
        replays = any(worker.engine.replays for worker in ready.workers)
        manner = manner_of(request, self._defaults, has_ids=bool(prompts.ids), replays=replays)
        if not self._resumes or manner not in (Manner.CONTINUE, Manner.REPLAY):
            return None
        limits = [self._room_tokens(request, len(ids), ready.context_tokens) for ids in prompts.ids]
        return Remains(request, ask, prompts.ids, limits, naming, manner, replays=replays)

    def _room_tokens(self, request: ClientRequest, prompt_tokens: int, context_tokens: int) -> int:
        return request.room_tokens(prompt_tokens, context_tokens, self._defaults.max_new_tokens)

    def _roots(self, model: str, salt: str) -> Roots:
        """How workers of ``model`` name the pages of a tenant."""
        return {
            kind: (self._root(kind, fingerprint, salt), fingerprint.format.page_tokens)
            for kind, fingerprint in self._brain.namings(model, self._clock()).items()
        }

    def _root(self, kind: PageName, fingerprint: Fingerprint, salt: str) -> PageName:
        """``kind`` is what the root would be without a salt."""
        root = self._known_roots.get((kind, salt))
        if root is None:
            if len(self._known_roots) >= MAX_ROOTS:
                self._known_roots.clear()
            root = self._known_roots[kind, salt] = root_name(fingerprint, salt=salt)
        return root

    def tick(self) -> None:
        """Time passed: who waits for a worker that will not write any more?"""
        now = self._clock()
        self.obey(self._brain.tick(now))
        for request_id, exchange in list(self._open.items()):
            if (since_s := exchange.silence.silent_since_s) is not None:
                self.obey(self._brain.silences.unanswered(request_id, since_s, now, exchange.silence.gap_s))
        if self._brain.copies.is_on and now - self._looked_s > COPY_EVERY_S:
            self._looked_s = now
            self._copy(now)

    def _copy(self, now: float) -> None:
        """Offer the pages of all running answers for copies."""
        for request_id, exchange in list(self._open.items()):
            if (written := exchange.written()) is not None:
                self.obey(self._brain.copies.look(request_id, *written, now))

    def request_status(self, request_id: str) -> dict[str, object] | None:
        """What a request waits for now, JSON-ready; None when it is over."""
        exchange = self._open.get(request_id)
        if exchange is None:
            return None
        request_status = self._brain.request_statuses.of(
            request_id, exchange.silence.silent_since_s, self._clock(), exchange.silence.gap_s
        )
        return msgspec.structs.asdict(request_status) | exchange.request_status()

    def running(self, tenant: str) -> list[dict[str, object]]:
        """Requests of ``tenant`` in flight, the oldest first, each with what it waits for; not too many."""
        now = self._clock()
        theirs = ((request_id, each) for request_id, each in self._open.items() if each.tenant == tenant)
        return [
            {"request_id": request_id, "age_s": now - each.received_s, "now": self.request_status(request_id)}
            for request_id, each in itertools.islice(theirs, MAX_RUNNING_TOLD)
        ]

    @property
    def journal_tokens(self) -> int:
        """Tokens kept of answers that are being written."""
        return sum(exchange.journal_tokens for exchange in self._open.values())

    def obey(self, commands: Iterable[Command]) -> None:
        """Pass the brain's commands to their exchanges, and to stores."""
        for command in commands:
            try:
                self._pass_on(command)
            except Exception:  # border: what fails at one request must not be lost to those whose commands follow
                log.exception("%s of request %s failed", type(command).__name__, command.request_id)
                if (exchange := self._open.get(command.request_id)) is not None:
                    exchange.fail()

    def _pass_on(self, command: Command) -> None:
        exchange = self._open.get(command.request_id)
        if isinstance(command, PullPages):
            self._order(command)
        elif exchange is not None:
            exchange.obey(command)
        if isinstance(command, Start):
            self.obey(command.plan.pulls)

    def _order(self, pull: PullPages) -> None:
        if not self._switchboard.say(pull.store, pull.order):
            why = "the router has no link to the store that was to push"
            event = TransferEvent(store=pull.store, transfer=pull.order.transfer, stage=Stage.FAILED, reason=why)
            self.obey(self._brain.transfer_event(event, self._clock()))

    def close(self, request_id: str, status: int, why: str = "") -> None:
        """The request is over with ``status``, ``why`` in its client's words, whatever was still running for it."""
        exchange = self._open.pop(request_id)
        # An answer that nobody wanted to the end was not broken by its worker.
        is_broken = exchange.broken and status != CLIENT_CLOSED
        timeline = exchange.close(502 if is_broken else status)
        timeline.failure = why
        self._telemetry.observe(timeline)
        self.obey(self._brain.admit_waiting(self._clock()))
        self._brain.experience.study()
