"""Decides which requests are let in now, which wait and which are refused. It must never hold a request that nothing
will let in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import msgspec

from kvrelay.fleet.admission_queue import AdmissionQueue, AdmissionQueues, QueuedRequest
from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import Ask, Flight, Refuse
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.overtaking import Overtaking
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.topology import Topology
from kvrelay.fleet.trials import Trials
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.admit import RETRY_AFTER_S, Accepted, Held, Limits, Outlook, Turned, admit, judge
from kvrelay.policy.cost import WAITS, Item
from kvrelay.policy.patience import MUCH_LONGER

SURE_AFTER = 8
"""Measurements of a worker or of its kind before a request may be refused for what they predict."""
ALWAYS_QUEUED = 2
"""Prompts that a P may have at any time, however long they are: one to compute and one to follow at once."""


class Door:
    """One for all requests of a router."""

    def __init__(self, fleet: Fleet, loads: Loads, experience: Experience, breakers: Breakers, limits: Limits) -> None:
        self._fleet = fleet
        self._loads = loads
        self._experience = experience
        self._breakers = breakers
        self._limits = limits
        self.waiting = AdmissionQueues()
        self._overtaking = Overtaking()
        self._trials = Trials()
        self._late: dict[str, QueuedRequest] = {}
        """Requests that were told to go and have not gone yet."""
        self.refused: Counter[str] = Counter()
        """Requests turned away, by kind."""

    def __repr__(self) -> str:
        return f"<Door {self.waiting!r}, {self.refused.total()} refused>"

    def __len__(self) -> int:
        return len(self.waiting) + len(self._late)

    def leave(self, request_id: str) -> QueuedRequest | None:
        """A request is over; None when it was let in."""
        self._overtaking.leave(request_id)
        return self.waiting.drop(request_id) or self._late.pop(request_id, None)

    def check(self, ask: Ask, topology: Topology, *, in_flight: int, own: int, now: float) -> Accepted | Turned:
        """Whether anybody may come in at all; ``own``: those in flight that are its tenant's."""
        back_in_s = 0.0 if topology.decode_workers else self._back_in_s(ask.facts.model, now)
        return admit(
            in_flight=in_flight,
            own=own if self._limits.shared else 0,
            decoders=len(topology.decode_workers),
            back_in_s=back_in_s,
            limit=self._limits.in_flight,
        )

    def _back_in_s(self, model: str, now: float) -> float:
        """When the first of the workers that fail is tried again."""
        decoders = [worker.name for worker in self._fleet.serving(model, now) if worker.role.decodes]
        return self._breakers.wait_s(decoders, now)

    def meet(
        self, ask: Ask, pick: Pick, topology: Topology, *, alone: bool, aside: bool = False, now: float
    ) -> Accepted | Held | Turned:
        """A new request: whether it may start as ``pick`` says. If it is held, it waits from now on. ``aside``: nobody
        who waits goes before it."""
        waiting = AdmissionQueue() if aside else self.waiting.of(ask.facts.model)
        outlook = self._outlook(ask, pick, topology, waiting, alone=alone, now=now)
        verdict = self._judge(ask, outlook, now)
        if isinstance(verdict, Turned):
            return verdict
        if isinstance(verdict, Held):
            self._hold(ask, pick, ask.received_s + verdict.until_s, now)
        elif outlook.overtakes and (head := waiting.head()) is not None:
            self._overtaking.went_before(head.request_id, pick.kv_tokens)
        return verdict

    def _judge(self, ask: Ask, outlook: Outlook, now: float) -> Accepted | Held | Turned:
        verdict = judge(ask.slo, outlook, self._limits)
        self._trials.judged(ask.facts.model, verdict, now)
        return verdict

    def landed(self, flight: Flight) -> None:
        """A request is over that was let in: if it was a trial, it has shown something."""
        self._trials.landed(flight)

    def waits_for_kv(self, request: QueuedRequest) -> bool:
        """Whether there was none for it when it came or when its turn did."""
        return self._overtaking.is_passed(request.request_id)

    def _hold(self, ask: Ask, pick: Pick, until_s: float, now: float) -> None:
        if not self.has_kv(pick):
            self._overtaking.lacks_kv(ask.facts.request_id)
        self.waiting.add(
            QueuedRequest(ask=ask, seconds=pick.prefill_s, since_s=now, until_s=until_s, decision=pick.decision)
        )

    def _outlook(
        self, ask: Ask, pick: Pick, topology: Topology, waiting: AdmissionQueue, *, alone: bool, now: float
    ) -> Outlook:
        ahead_s = waiting.ahead_s(ask, pick.prefill_s) if waiting else 0.0
        return msgspec.structs.replace(
            self._prospect(ask, pick, alone=alone and not waiting, now=now),
            ahead_s=ahead_s / (len(topology.prefill_workers) or len(topology.decode_workers)),
            room=self.has_room(pick, alone=alone, now=now),
            overtakes=self._overtakes(pick, waiting),
        )

    def _prospect(self, ask: Ask, pick: Pick, *, alone: bool, now: float) -> Outlook:
        """The outlook of a request that starts now."""
        chosen, items = pick.decision.chosen, dict(pick.decision.chosen.items)
        prefill, decode = self._experience.prefill(pick.computed_on.name), pick.decode.name
        return Outlook(
            waited_s=now - ask.received_s,
            ttft_s=chosen.ttft_s,
            queued_s=sum(items.get(wait, 0.0) for wait in WAITS),
            tpot_s=chosen.tpot_s,
            sure=prefill.seen >= SURE_AFTER,
            guessed_s=0.0 if self._experience.answer(decode).seen >= SURE_AFTER else items.get(Item.ANSWER, 0.0),
            tpot_sure=self._experience.step(decode).seen >= SURE_AFTER,
            alone=alone,
            trial_due=alone and self._trials.is_due(ask.facts.model, now),
        )

    def turn(
        self, head: QueuedRequest, pick: Pick, *, alone: bool, at_most: float = math.inf, now: float
    ) -> Accepted | Held | Turned:
        """The head of a queue, of those that need ``at_most`` such a context, may start as ``pick`` says, waits on, or
        is turned away: its promise could be kept when it came, but what was predicted may have changed."""
        if not self.has_room(pick, alone=alone, now=now):
            if not self.has_kv(pick):
                self._overtaking.lacks_kv(head.request_id)
            return Held(until_s=head.until_s - head.ask.received_s)
        prospect = self._prospect(head.ask, pick, alone=alone, now=now)
        verdict = self._judge(head.ask, prospect, now)
        if isinstance(verdict, Accepted):
            self.waiting.take(head.ask.facts.model, at_most)
            self._overtaking.leave(head.request_id)
        elif isinstance(verdict, Turned):
            self._turn_away(msgspec.structs.replace(head, decision=pick.decision), verdict.kind, verdict.reason)
        return verdict

    def has_outgrown(self, head: QueuedRequest) -> bool:
        """Whether no worker that is known, usable now or not, takes its prompt and answer."""
        return head.ask.context_tokens > self._fleet.longest_context(head.ask.facts.model)

    def outgrown(self, head: QueuedRequest, turned: Turned) -> Refuse:
        """The last worker whose context takes this request has left: it is refused, so that no other one waits behind
        it."""
        self._turn_away(head, turned.kind, turned.reason)
        return Refuse(request_id=head.request_id, reason=turned.reason, after_s=turned.after_s)

    def _turn_away(self, request: QueuedRequest, kind: str, why: str) -> None:
        """It waits no more; its end will be told."""
        self.refused[kind] += 1
        self._overtaking.leave(request.request_id)
        self.waiting.drop(request.request_id)
        self._late[request.request_id] = msgspec.structs.replace(request, refusal=why)

    def _overtakes(self, pick: Pick, waiting: AdmissionQueue) -> bool:
        """Much shorter than those that wait are on average, and no more than a crumb of the KV that they may be waiting
        for."""
        head = waiting.head()
        if head is None or not pick.computed_on.engine.lets_pass or MUCH_LONGER * pick.prefill_s > waiting.mean_s:
            return False
        return self._overtaking.allows(head.request_id, pick.kv_tokens, self._kv_tokens(pick))

    def has_room(self, pick: Pick, *, alone: bool, now: float) -> bool:
        """D has KV for the whole answer before P begins, and P's own queue is short."""
        return alone or (self.has_kv(pick) and self._is_short(pick, now))

    def has_kv(self, pick: Pick) -> bool:
        """Whether D has KV for the whole answer, or nothing else to write."""
        held, name = self._loads.kv_tokens[pick.decode.name], pick.decode.name
        return held + pick.kv_tokens <= self._kv_tokens(pick) or not self._loads.sequences[name]

    def _kv_tokens(self, pick: Pick) -> float:
        """What may be promised of the KV of its D."""
        return self._limits.kv_share * pick.decode.engine.kv_tokens

    def _is_short(self, pick: Pick, now: float) -> bool:
        name, own_s = pick.computed_on.name, pick.prefill_s if pick.computed_on.engine.lets_pass else math.inf
        queued_s = self._loads.wait_s(name, now, own_s)
        return self._loads.prompts(name) < ALWAYS_QUEUED or queued_s <= self._limits.queue_s

    def overdue(self, now: float) -> Iterator[Refuse]:
        """Refuse the requests that waited too long."""
        for request in self.waiting.overdue(now) if self.waiting else ():
            why = self._why_late(request, now)
            self._turn_away(request, "deadline", why)
            yield Refuse(request_id=request.request_id, reason=why, after_s=RETRY_AFTER_S)

    def _why_late(self, request: QueuedRequest, now: float) -> str:
        return f"it waited {now - request.since_s:.1f} s and its turn did not come in time; retry later"
