"""A fleet in simulated time around a real brain: workers that share their steps, stores, and all that can go wrong.

Everything the brain is told comes from here, and everything that it orders is carried out, or fails, here.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvrelay.errors import Overloaded
from kvrelay.fleet.flight import (
    AbandonPrefill,
    Ask,
    Command,
    DispatchDecode,
    Plan,
    PrefillOrder,
    PullPages,
    Refuse,
    SendPrefill,
    Start,
)
from kvrelay.protocol.feed import TransferEvent
from kvrelay.types import PageName, Role, Stage, StoreInfo, WorkerInfo
from tests.fleet.known import TOKEN_S, Told, known_brain, member

PAGE = 32
TICK_S = 0.1
ANSWER_S, ANSWER_TOKENS_S = 0.02, 0.2
PULL_S = 0.03
STALL_S = 60.0


@dataclass(eq=False)
class Job:
    """One prompt in an engine."""

    order: PrefillOrder
    request_id: str
    names: tuple[PageName, ...]
    left_s: float
    cached: int
    fails_after_s: float = float("inf")


@dataclass
class Engine:
    """Computes all its prompts side by side, each as fast as their number allows."""

    info: WorkerInfo
    jobs: list[Job] = field(default_factory=list)
    pages: set[PageName] = field(default_factory=set)
    since_s: float = 0.0
    turn: int = 0
    worked_s: float = 0.0

    def advance(self, now: float) -> None:
        if self.jobs:
            share = (now - self.since_s) / len(self.jobs)
            self.worked_s += now - self.since_s
            for job in self.jobs:
                job.left_s -= share
                job.fails_after_s -= share
        self.since_s = now

    def next_s(self) -> float:
        """Seconds until one of the jobs ends."""
        return len(self.jobs) * max(0.0, min(min(job.left_s, job.fails_after_s) for job in self.jobs))


class World:
    """Use ``run``."""

    def __init__(self, nodes: int, prefills: int, *, faults: float, seed: int) -> None:
        places = [f"s{number % nodes + 1}" for number in range(prefills)]
        workers = [(f"p{number}", place) for number, place in enumerate(places)]
        self.brain = known_brain(workers, [("d0", "s1"), ("d1", f"s{nodes}")], page_tokens=PAGE)
        self.faults = faults
        self.now = 0.0
        self.dice = random.Random(seed)
        self.told = Told(self.brain)
        self.engines = {name: Engine(member(name, Role.PREFILL, place, page_tokens=PAGE)) for name, place in workers}
        self.stores: dict[str, set[PageName]] = {place: set() for place in places}
        self.asks: dict[str, Ask] = {}
        self.statuses: Counter[int] = Counter()
        self.computed: dict[str, int] = {}
        """Tokens of the prompt that were cached, by request: of the prefill that came to its end."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()

    # ------------------------------------------------------------ time

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + after_s, next(self._ids), call))

    def run(self, until_idle: Callable[[], bool]) -> None:
        """Until nobody is in flight any more."""
        self._tick()
        while not (until_idle() and self.brain.in_flight == 0):
            self.now, _, call = heapq.heappop(self._heap)
            call()

    def _tick(self) -> None:
        self.obey(self.brain.tick(self.now))
        self.later(TICK_S, self._tick)

    def unlucky(self, share: float = 1.0) -> bool:
        return self.dice.random() < self.faults * share

    # ------------------------------------------------------------ requests

    def come(self, ask: Ask) -> None:
        """A client asks, and may lose patience."""
        name = ask.facts.request_id
        self.asks[name] = ask
        try:
            plan = self.brain.begin(ask, self.now)
        except Overloaded:
            self.statuses[503] += 1
            del self.asks[name]
            return
        if isinstance(plan, Plan):
            self._start(name, plan)
        if self.unlucky(0.3):
            self.later(self.dice.uniform(0.0, 2.0), lambda: self._end(name, 499))

    def _start(self, name: str, plan: Plan) -> None:
        for order in plan.prefills:
            self._send(name, order)
        self.obey(plan.pulls)
        if not plan.prefills and not plan.pulls and not plan.held and plan.path == "local":
            self._decode(name)

    def _end(self, name: str, status: int) -> None:
        if self.asks.pop(name, None) is None:
            return
        for engine in self.engines.values():
            engine.advance(self.now)
            engine.jobs = [job for job in engine.jobs if job.request_id != name]
            self._plan(engine)
        self.brain.finish(name, status=status, output_tokens=8 if status == 200 else 0, now=self.now)
        self.statuses[status] += 1
        self.obey(self.brain.admit_waiting(self.now))

    def obey(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, PullPages):
                self._pull(command)
            elif command.request_id not in self.asks:
                continue
            elif isinstance(command, SendPrefill):
                self._send(command.request_id, command.order)
            elif isinstance(command, DispatchDecode):
                self._decode(command.request_id)
            elif isinstance(command, AbandonPrefill):
                self._abandon(command)
            elif isinstance(command, Start):
                self._start(command.request_id, command.plan)
            elif isinstance(command, Refuse):
                self._end(command.request_id, 503)

    # ------------------------------------------------------------ P

    def _send(self, name: str, order: PrefillOrder) -> None:
        engine, facts = self.engines[order.worker], self.asks[name].facts
        (names,) = facts.page_names[0].values()
        self.brain.prefill_sent(name, self.now)
        cached = PAGE * max(_depth(engine.pages, names), _depth(self.stores[engine.info.store], names))
        job = Job(order, name, names, TOKEN_S * max(1, facts.prompt_tokens[0] - cached), cached)
        if self.unlucky():
            job.fails_after_s = self.dice.uniform(0.0, job.left_s)
        elif self.unlucky(0.1):
            job.left_s = STALL_S
        engine.advance(self.now)
        engine.jobs.append(job)
        self.obey(self.brain.transfer_event(self._says(engine, order, Stage.STARTED), self.now))
        self._plan(engine)

    def _says(self, engine: Engine, order: PrefillOrder, stage: Stage) -> TransferEvent:
        return TransferEvent(store=engine.info.store, transfer=order.transfer, stage=stage)

    def _plan(self, engine: Engine) -> None:
        engine.turn += 1
        if engine.jobs:
            turn = engine.turn
            self.later(engine.next_s(), lambda: self._over(engine, turn))

    def _over(self, engine: Engine, turn: int) -> None:
        if turn != engine.turn:
            return
        engine.advance(self.now)
        done = [job for job in engine.jobs if min(job.left_s, job.fails_after_s) < 1e-9]
        engine.jobs = [job for job in engine.jobs if job not in done]
        self._plan(engine)
        for job in done:
            self._finish(engine, job)

    def _finish(self, engine: Engine, job: Job) -> None:
        if job.request_id not in self.asks:
            return
        if job.fails_after_s < 1e-9:
            self.obey(self.brain.prefill_failed(job.request_id, job.order.index, self.now))
            return
        engine.pages.update(job.names)
        self.stores[engine.info.store].update(job.names)
        if not self.unlucky():  # else nobody tells
            store = self.brain.fleet.stores.get(engine.info.store)
            assert store is not None
            self.obey(self.told.has(store.info, job.names, self.now))  # type: ignore[arg-type]
            self.obey(self.told.has(engine.info, job.names, self.now))  # type: ignore[arg-type]
        self.computed[job.request_id] = job.cached
        self.obey(self.brain.prefill_finished(job.request_id, job.order.index, job.cached, self.now))

    def _abandon(self, command: AbandonPrefill) -> None:
        for engine in self.engines.values():
            engine.advance(self.now)
            engine.jobs = [job for job in engine.jobs if job.request_id != command.request_id]
            self._plan(engine)
        self.obey(self.brain.prefill_failed(command.request_id, command.index, self.now, blamed=False))

    def restart(self, name: str) -> None:
        """A P dies and is born anew at once, with an empty cache."""
        engine = self.engines[name]
        engine.advance(self.now)
        engine.jobs, engine.pages = [], set()
        engine.turn += 1
        engine.info = msgspec.structs.replace(engine.info, incarnation=f"{engine.info.incarnation}+")
        self.obey(self.brain.register_worker(engine.info, self.now))

    # ------------------------------------------------------------ stores

    def _pull(self, command: PullPages) -> None:
        if self.unlucky(0.5):
            return  # the store never hears it
        source = self.stores[command.store]
        target = next(info for info in self._stores() if info.address == command.order.push_to)
        whole = source.issuperset(command.order.names) and not self.unlucky(0.5)

        def arrive() -> None:
            if whole:
                self.stores[target.name].update(command.order.names)
            stage = Stage.ARRIVED if whole else Stage.FAILED
            event = TransferEvent(store=target.name, transfer=command.order.transfer, stage=stage, bytes=1000 * whole)
            self.obey(self.brain.transfer_event(event, self.now))

        self.later(PULL_S, arrive)

    def _stores(self) -> list[StoreInfo]:
        return [member.info for member in self.brain.fleet.stores]

    # ------------------------------------------------------------ D

    def _decode(self, name: str) -> None:
        worker = self.brain.decode_order(name, self.now).worker
        self.later(ANSWER_S, lambda: self._first(name, worker))

    def _first(self, name: str, worker: str) -> None:
        if name not in self.asks:
            return
        if self.unlucky(0.2) and self.brain.decode_refused(name, self.now):
            self._decode(name)
            return
        (names,) = self.asks[name].facts.page_names[0].values()
        decode = self.brain.fleet.workers.get(worker)
        assert decode is not None
        self.stores[decode.info.store].update(names)  # it was handed over, or computed there
        self.obey(self.brain.first_token(name, self.now))
        self.later(ANSWER_TOKENS_S, lambda: self._end(name, 200))


def _depth(pages: set[PageName], names: tuple[PageName, ...]) -> int:
    for position, name in enumerate(names):
        if name not in pages:
            return position
    return len(names)
