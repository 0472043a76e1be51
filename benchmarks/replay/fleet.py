"""A trace comes to a fleet in simulated time. It must never read the clock: the same trace gives the same figures."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.quantiles import quantile
from benchmarks.replay.engine import MODEL, PRINT, Stride, TracedEngine
from benchmarks.replay.front import Front, Sent
from benchmarks.replay.trace import TracedRequest
from kvrelay.deploy.mock.sequence import Sequence as Written
from kvrelay.errors import Overloaded
from kvrelay.fleet.flight import Ask
from kvrelay.identity import root_of
from kvrelay.types import RequestFacts

TICK_S = 0.2
"""Time between two ticks of the router."""


@dataclass
class Outcome:
    """What became of a trace."""

    input_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens that the engine which computed the prompt found in its cache."""
    refused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    by_engine: list[int] = field(default_factory=list)
    """Requests that each served."""

    @property
    def reuse(self) -> float:
        """Share of all prompt tokens, as DynoSim's ``prefix_cache_reused_ratio``."""
        return self.reused_tokens / self.input_tokens

    def figures(self) -> dict[str, float]:
        """For a file of results."""
        return {
            "requests": len(self.e2e_s),
            "refused": self.refused,
            "reuse": round(self.reuse, 4),
            "ttft_mean_ms": round(1e3 * sum(self.ttft_s) / len(self.ttft_s), 1),
            "ttft_p99_ms": round(1e3 * quantile(self.ttft_s, 0.99), 1),
            "e2e_mean_ms": round(1e3 * sum(self.e2e_s) / len(self.e2e_s), 1),
            "busiest_to_mean": round(max(self.by_engine) * len(self.by_engine) / sum(self.by_engine), 3),
        }


class Arrival(NamedTuple):
    """A traced request, and when it comes."""

    number: int
    traced: TracedRequest
    at_s: float


class TracedFleet:
    """Simulated engines and what they have open; ``replay`` runs one."""

    def __init__(self, engines: Sequence[TracedEngine], front: Front) -> None:
        self._engines = {engine.info.name: engine for engine in engines}
        self._front = front
        self._served = dict.fromkeys(self._engines, 0)
        self._outcome = Outcome()
        self._rest: Iterator[Arrival] = iter(())
        self._open: dict[str, Arrival] = {}
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids = itertools.count()

    def __repr__(self) -> str:
        return f"<TracedFleet of {len(self._engines)} engines, {len(self._open)} open>"

    def replay(self, trace: Sequence[TracedRequest], arrivals_s: Sequence[float]) -> Outcome:
        """Until every answer is whole."""
        self._rest = map(Arrival, itertools.count(), trace, arrivals_s)
        self._expect()
        self._tick(0.0)
        while self._heap and (self._open or len(self._heap) > 1):
            now, _, call = heapq.heappop(self._heap)
            call(now)
        self._outcome.by_engine = list(self._served.values())
        for engine in self._engines.values():
            totals = engine.scheduler.totals
            self._outcome.reused_tokens += totals.local
            self._outcome.input_tokens += totals.local + totals.computed
            engine.scheduler.cache.check_invariants()
        return self._outcome

    def _at(self, at_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._ids), call))

    def _tick(self, now: float) -> None:
        self._send(self._front.tick(now), now)
        self._at(now + TICK_S, self._tick)

    def _expect(self) -> None:
        """The next one alone: a trace has more requests than a heap should hold."""
        arrival = next(self._rest, None)
        if arrival is not None:
            self._at(arrival.at_s, lambda now: self._come(arrival, now))

    def _come(self, arrival: Arrival, now: float) -> None:
        name = f"r{arrival.number}"
        self._open[name] = arrival
        facts = RequestFacts(
            request_id=name,
            model=MODEL,
            prompt_tokens=(arrival.traced.input_length,),
            max_tokens=max(1, arrival.traced.output_length),
            page_names=({root_of(PRINT): tuple(arrival.traced.full_names)},),
        )
        try:
            self._send(self._front.come(Ask(facts=facts, received_s=now), now), now)
        except Overloaded:
            del self._open[name]
            self._outcome.refused += 1
        self._expect()

    def _send(self, sent: Iterable[Sent], now: float) -> None:
        for request_id, worker in sent:
            arrival, engine = self._open[request_id], self._engines[worker]
            self._served[worker] += 1
            engine.submit(request_id, arrival.traced, arrival.number)
            self._wake(engine, now)

    def _wake(self, engine: TracedEngine, now: float) -> None:
        """A request is there."""
        stride = engine.stride
        if stride is not None and stride.cut(now):
            self._at(stride.ends_s, lambda now: self._end(engine, stride, now))
        elif stride is None:  # in a moment: what comes at the same time may share the step
            self._at(now, lambda now: self._begin(engine, now) if engine.stride is None else None)

    def _begin(self, engine: TracedEngine, now: float) -> None:
        stride = engine.begin(now)
        if stride is not None:
            self._at(stride.ends_s, lambda now: self._end(engine, stride, now))

    def _end(self, engine: TracedEngine, stride: Stride, now: float) -> None:
        if engine.stride is not stride:
            return  # it was cut short, and has ended before
        engine.stride = None
        written = engine.end(stride, now)
        self._send(self._front.stepped(engine, now), now)
        for sequence in written:
            self._wrote(sequence, now)
        if engine.stride is None:
            self._begin(engine, now)

    def _wrote(self, sequence: Written, now: float) -> None:
        if sequence.written == 1:
            self._outcome.ttft_s.append(now - self._open[sequence.id].at_s)
            self._send(self._front.wrote(sequence.id, now), now)
        if sequence.ending is not None:
            self._outcome.e2e_s.append(now - self._open.pop(sequence.id).at_s)
            self._send(self._front.ended(sequence.id, sequence.written, now), now)
