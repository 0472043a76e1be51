"""Who gets in now, who waits, and who is refused. It must never hold a request that nothing will let in."""

from __future__ import annotations

import math
from collections import Counter

from kvrelay.errors import Overloaded
from kvrelay.fleet.breakers import Breakers
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.flight import Ask, Refuse
from kvrelay.fleet.ground import Ground
from kvrelay.fleet.loads import Loads
from kvrelay.fleet.pick import Pick
from kvrelay.fleet.waiting import Waiting, WaitingRooms
from kvrelay.fleet.workers import Fleet
from kvrelay.policy.admit import RETRY_AFTER_S, Accepted, Limits, Outlook, Turned, admit, judge
from kvrelay.policy.patience import MUCH_LONGER

SURE_AFTER = 8
"""Prefills seen of a worker before somebody is refused for what it is predicted to take."""
CRUMB_SHARE = 0.02
"""Of D's KV: who overtakes takes no more, since those that wait may do so for KV."""
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
        self.waiting = WaitingRooms()
        self._late: dict[str, Ask] = {}
        """Requests that were told to go and have not gone yet."""
        self.refused: Counter[str] = Counter()
        """Requests turned away, by kind."""

    def __repr__(self) -> str:
        return f"<Door {self.waiting!r}, {self.refused.total()} refused>"

    def __len__(self) -> int:
        return len(self.waiting) + len(self._late)

    def leave(self, request_id: str) -> Ask | None:
        """A request is over; None when it was let in."""
        waited = self.waiting.drop(request_id)
        return waited.ask if waited is not None else self._late.pop(request_id, None)

    def check(self, ask: Ask, ground: Ground, *, in_flight: int, own: int, now: float) -> None:
        """Whether anybody may come in at all; ``own``: those in flight that are its tenant's. Raises ``Overloaded``."""
        back_in_s = 0.0 if ground.writers else self._back_in_s(ask.facts.model, now)
        verdict = admit(
            in_flight=in_flight,
            own=own,
            decoders=len(ground.writers),
            back_in_s=back_in_s,
            limit=self._limits.in_flight,
        )
        if isinstance(verdict, Turned):
            raise self._turned(verdict)

    def _back_in_s(self, model: str, now: float) -> float:
        """When the first of the workers that fail is tried again."""
        decoders = [worker.name for worker in self._fleet.serving(model, now) if worker.role.decodes]
        return self._breakers.wait_s(decoders, now)

    def _turned(self, verdict: Turned) -> Overloaded:
        self.refused[verdict.kind] += 1
        return Overloaded(verdict.reason, verdict.after_s)

    def lets_in(self, ask: Ask, pick: Pick, ground: Ground, *, alone: bool, now: float) -> bool:
        """True: it may start as ``pick`` says; False: it waits from now on. Raises ``Overloaded``."""
        verdict = judge(ask.slo, self._outlook(ask, pick, ground, alone=alone, now=now), self._limits)
        if isinstance(verdict, Turned):
            raise self._turned(verdict)
        if isinstance(verdict, Accepted):
            return True
        until_s = ask.received_s + verdict.until_s
        self.waiting.add(Waiting(ask=ask, seconds=pick.prefill_s, since_s=now, until_s=until_s))
        return False

    def _outlook(self, ask: Ask, pick: Pick, ground: Ground, *, alone: bool, now: float) -> Outlook:
        chosen = pick.decision.chosen
        waiting = self.waiting.of(ask.facts.model)
        ahead_s = waiting.ahead_s(ask, pick.prefill_s) if waiting else 0.0
        return Outlook(
            waited_s=now - ask.received_s,
            ahead_s=ahead_s / (len(ground.readers) or len(ground.writers)),
            ttft_s=chosen.ttft_s,
            tpot_s=chosen.tpot_s,
            room=self.has_room(pick, alone=alone, now=now),
            overtakes=self._overtakes(pick, waiting.mean_s),
            sure=self._experience.prefill(pick.reader.name).seen >= SURE_AFTER,
            alone=alone and not waiting,
        )

    def _overtakes(self, pick: Pick, mean_s: float) -> bool:
        """Much shorter than those that wait, which take ``mean_s`` on average, and no more than a crumb of the KV that
        they may be waiting for."""
        much_shorter = mean_s > 0.0 and MUCH_LONGER * pick.prefill_s <= mean_s
        crumb = pick.kv_tokens <= CRUMB_SHARE * pick.decode.engine.kv_tokens
        return much_shorter and crumb and pick.reader.engine.lets_pass

    def has_room(self, pick: Pick, *, alone: bool, now: float) -> bool:
        """D has KV for the whole answer before P begins, and P's own queue is short."""
        return alone or (self._has_kv(pick) and self._is_short(pick, now))

    def _has_kv(self, pick: Pick) -> bool:
        held, name = self._loads.kv_tokens[pick.decode.name], pick.decode.name
        return held + pick.kv_tokens <= pick.decode.engine.kv_tokens or not self._loads.sequences[name]

    def _is_short(self, pick: Pick, now: float) -> bool:
        name, own_s = pick.reader.name, pick.prefill_s if pick.reader.engine.lets_pass else math.inf
        queued_s = self._loads.wait_s(name, now, own_s)
        return self._loads.prompts(name) < ALWAYS_QUEUED or queued_s <= self._limits.queue_s

    def overdue(self, now: float) -> list[Refuse]:
        """Those who waited too long are turned away."""
        late = self.waiting.overdue(now) if self.waiting else []
        for request in late:
            self.refused["deadline"] += 1
            self.waiting.drop(request.request_id)
            self._late[request.request_id] = request.ask
        return [
            Refuse(request_id=request.request_id, reason=self._why_late(request, now), after_s=RETRY_AFTER_S)
            for request in late
        ]

    def _why_late(self, request: Waiting, now: float) -> str:
        return f"it waited {now - request.since_s:.1f} s and its turn did not come in time; retry later"
