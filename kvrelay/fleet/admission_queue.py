"""Requests that wait in the router: by priority, fair between tenants, first come first served within one. It must
never let one model's requests hold up another's, nor serve one tenant while another with the same right starves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.fleet.flight import Ask
from kvrelay.policy.fair import Line, Share, ahead_s, next_turn
from kvrelay.policy.route import Decision
from kvrelay.types import Value


class QueuedRequest(Value, frozen=True, kw_only=True):
    """One request in the queue, as it came."""

    ask: Ask
    seconds: float
    """Predicted work of a P for it."""
    since_s: float
    until_s: float
    """On the clock of ``now``."""
    decision: Decision | None = None
    """What was predicted of it last."""
    refusal: str = ""
    """Why it was turned away; empty as long as it was not."""

    @property
    def request_id(self) -> str:
        return self.ask.facts.request_id


@dataclass
class _Line:
    """One tenant's requests of one priority."""

    weight: float
    requests: deque[QueuedRequest] = field(default_factory=deque)
    credit_s: float = 0.0
    waiting_s: float = 0.0
    """Predicted work of all of them."""

    def add(self, request: QueuedRequest) -> None:
        self.requests.append(request)
        self.waiting_s += request.seconds

    def remove(self, request: QueuedRequest) -> None:
        self.requests.remove(request)
        self.waiting_s -= request.seconds

    def first(self, at_most: float) -> QueuedRequest | None:
        """The first that needs a context of ``at_most`` so many tokens."""
        return next((request for request in self.requests if request.ask.context_tokens <= at_most), None)

    def share(self, first: QueuedRequest) -> Share:
        """``first`` is to be served next."""
        return Share(credit_s=self.credit_s, head_s=first.seconds, weight=self.weight)

    def line(self) -> Line:
        return Line(waiting_s=self.waiting_s, weight=self.weight)


class AdmissionQueue:
    """Requests for one model: lines by priority and tenant."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, _Line]] = {}
        """Tenants in the order of the round."""
        self._waiting: dict[str, QueuedRequest] = {}
        """All queued requests, by id."""

    def __repr__(self) -> str:
        tenants = {tenant for lines in self._lines.values() for tenant in lines}
        return f"<AdmissionQueue {len(self._waiting)} requests of {len(tenants)} tenants>"

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (request for lines in self._lines.values() for line in lines.values() for request in line.requests)

    def find(self, request_id: str) -> QueuedRequest | None:
        """None when it does not wait."""
        return self._waiting.get(request_id)

    def add(self, request: QueuedRequest) -> None:
        slo = request.ask.slo
        self._lines.setdefault(slo.priority, {}).setdefault(request.ask.tenant, _Line(slo.share)).add(request)
        self._waiting[request.request_id] = request

    def ahead_s(self, ask: Ask, own_s: float) -> float:
        """Predicted work of those that go before ``ask``, which comes now and takes ``own_s``."""
        higher_s = sum(self._waiting_s(level) for level in self._lines if level > ask.slo.priority)
        lines = self._lines.get(ask.slo.priority, {})
        own = lines.get(ask.tenant, _Line(ask.slo.share)).line()
        return higher_s + ahead_s(own, own_s, [line.line() for name, line in lines.items() if name != ask.tenant])

    def _waiting_s(self, priority: int) -> float:
        return sum(line.waiting_s for line in self._lines[priority].values())

    @property
    def mean_s(self) -> float:
        """Mean predicted work of those that wait; 0 without any."""
        return sum(map(self._waiting_s, self._lines)) / len(self) if self._lines else 0.0

    def head(self, at_most: float = math.inf) -> QueuedRequest | None:
        """The request whose turn it is, among those that need a context of ``at_most`` so many tokens; None when there
        is none."""
        found = self._next(at_most)
        return found[0] if found is not None else None

    def _next(self, at_most: float) -> tuple[QueuedRequest, tuple[float, ...]] | None:
        """The head, and the credits of all tenants that had one as soon as it is served."""
        for priority in sorted(self._lines, reverse=True):
            lines = self._lines[priority]
            firsts = {tenant: first for tenant, line in lines.items() if (first := line.first(at_most)) is not None}
            if firsts:
                turn = next_turn([lines[tenant].share(first) for tenant, first in firsts.items()])
                return list(firsts.values())[turn.position], turn.credits_s
        return None

    def take(self, at_most: float = math.inf) -> QueuedRequest:
        """Take the head off the queue; its tenant pays. Raises IndexError when the queue is empty."""
        found = self._next(at_most)
        if found is None:
            raise IndexError("nobody waits")
        request, credits_s = found
        lines = self._lines[request.ask.slo.priority]
        served = [line for line in lines.values() if line.first(at_most) is not None]
        for line, credit_s in zip(served, credits_s, strict=True):
            line.credit_s = credit_s
        lines[request.ask.tenant] = lines.pop(request.ask.tenant)  # to the end of the round
        self.drop(request.request_id)
        return request

    def drop(self, request_id: str) -> QueuedRequest | None:
        """A request leaves without its turn; None when it does not wait."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return None
        tenant, priority = request.ask.tenant, request.ask.slo.priority
        lines = self._lines[priority]
        lines[tenant].remove(request)
        if not lines[tenant].requests:
            del lines[tenant]  # and its credit: a tenant that leaves the round begins anew
        if not lines:
            del self._lines[priority]
        return request

    def overdue(self, now: float) -> list[QueuedRequest]:
        """Requests whose time to wait is over."""
        return [
            request
            for lines in self._lines.values()
            for line in lines.values()
            for request in line.requests
            if now > request.until_s
        ]


class AdmissionQueues:
    """An admission queue for each model with queued requests: each model has workers, and so turns, of its own."""

    def __init__(self) -> None:
        self._queues: dict[str, AdmissionQueue] = {}

    def __repr__(self) -> str:
        return f"<AdmissionQueues {self._queues!r}>"

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def of(self, model: str) -> AdmissionQueue:
        """The queue of ``model``; an empty one when it has no queued request."""
        return self._queues.get(model) or AdmissionQueue()

    def models(self) -> list[str]:
        """Models with queued requests."""
        return list(self._queues)

    def add(self, request: QueuedRequest) -> None:
        self._queues.setdefault(request.ask.facts.model, AdmissionQueue()).add(request)

    def take(self, model: str, at_most: float = math.inf) -> QueuedRequest:
        """The head of ``model``'s queue, of those that need ``at_most`` such a context, leaves, and its tenant pays.
        Raises IndexError when nobody waits."""
        request = self.of(model).take(at_most)
        self._tidy(model)
        return request

    def drop(self, request_id: str) -> QueuedRequest | None:
        """A request leaves without its turn; None when it does not wait."""
        for model, queue in self._queues.items():
            if (request := queue.drop(request_id)) is not None:
                self._tidy(model)
                return request
        return None

    def _tidy(self, model: str) -> None:
        if not self._queues[model]:
            del self._queues[model]

    def find(self, request_id: str) -> QueuedRequest | None:
        """None when it does not wait."""
        queues = (queue for queue in self._queues.values() if request_id in queue)
        return next((queue.find(request_id) for queue in queues), None)

    def overdue(self, now: float) -> list[QueuedRequest]:
        """Requests whose time to wait is over."""
        return [request for queue in self._queues.values() for request in queue.overdue(now)]
