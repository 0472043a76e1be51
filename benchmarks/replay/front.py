"""Whoever says to which engine a traced request goes: the router's brain, or nobody in particular. It must never see
the trace: what it knows, clients and workers told it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from benchmarks.replay.engine import TracedEngine
from kvrelay.fleet.brain import Brain
from kvrelay.fleet.flight import Ask, Command, DispatchDecode, Plan, Queued, Start
from kvrelay.policy.route import Path
from kvrelay.protocol.feed import PageEvents, PageSnapshot
from kvrelay.types import WorkerInfo


class Sent(NamedTuple):
    """A request goes to a worker, now."""

    request_id: str
    worker: str


class Front(Protocol):
    """What happens in front of the engines; each call answers with the requests that are to be sent now."""

    def come(self, ask: Ask, now: float) -> Iterable[Sent]:
        """A client asks. Raises ``Overloaded``."""

    def stepped(self, engine: TracedEngine, now: float) -> Iterable[Sent]:
        """A step is over, and the engine tells of its pages."""

    def wrote(self, request_id: str, now: float) -> Iterable[Sent]:
        """The first token of an answer is here."""

    def ended(self, request_id: str, output_tokens: int, now: float) -> Iterable[Sent]:
        """The answer is whole."""

    def tick(self, now: float) -> Iterable[Sent]:
        """Time passed."""


class RoundRobin:
    """A front that sends requests to the workers in turn."""

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self._turns = itertools.cycle(worker.name for worker in workers)

    def __repr__(self) -> str:
        return "<RoundRobin>"

    def come(self, ask: Ask, now: float) -> Iterable[Sent]:
        return (Sent(ask.facts.request_id, next(self._turns)),)

    def stepped(self, engine: TracedEngine, now: float) -> Iterable[Sent]:
        return ()

    def wrote(self, request_id: str, now: float) -> Iterable[Sent]:
        return ()

    def ended(self, request_id: str, output_tokens: int, now: float) -> Iterable[Sent]:
        return ()

    def tick(self, now: float) -> Iterable[Sent]:
        return ()


class Routed:
    """The router without its sockets: what it tells its brain, and what becomes of the brain's commands."""

    def __init__(self, engines: Iterable[TracedEngine]) -> None:
        self.brain = Brain(dead_after_s=1e9, transfer_wait_s=1e9)
        self._feeds: dict[str, Iterator[PageEvents | PageSnapshot | None]] = {}
        for engine in engines:
            self.brain.register_worker(engine.info, 0.0)
            wanted = self.brain.members.pages_wanted(engine.info, 0.0)
            self._feeds[engine.info.name] = engine.log.follow(wanted.after)

    def __repr__(self) -> str:
        return f"<Routed by {self.brain!r}>"

    def come(self, ask: Ask, now: float) -> Iterable[Sent]:
        plan = self.brain.begin(ask, now)
        return () if isinstance(plan, Queued) else self._start(ask.facts.request_id, plan, now)

    def _start(self, request_id: str, plan: Plan, now: float) -> list[Sent]:
        assert plan.path is Path.LOCAL, "without stores nobody hands over"
        return [] if plan.held else [self._send(request_id, now)]

    def _send(self, request_id: str, now: float) -> Sent:
        return Sent(request_id, self.brain.decode_order(request_id, now).worker)

    def _obey(self, commands: Iterable[Command], now: float) -> list[Sent]:
        sent: list[Sent] = []
        for command in commands:
            match command:
                case DispatchDecode(request_id=request_id):
                    sent.append(self._send(request_id, now))
                case Start(request_id=request_id, plan=plan):
                    sent += self._start(request_id, plan, now)
                case _:
                    raise AssertionError(f"nothing fails here, and yet: {command}")
        return sent

    def stepped(self, engine: TracedEngine, now: float) -> Iterable[Sent]:
        feed, sent = self._feeds[engine.info.name], list[Sent]()
        while (message := next(feed)) is not None:
            wanted, commands = self.brain.pages(engine.info, message, now)
            assert wanted is None, "no message is lost here"
            sent += self._obey(commands, now)
        return sent

    def wrote(self, request_id: str, now: float) -> Iterable[Sent]:
        return self._obey(self.brain.first_token(request_id, now), now)

    def ended(self, request_id: str, output_tokens: int, now: float) -> Iterable[Sent]:
        self.brain.finish(request_id, status=200, output_tokens=output_tokens, now=now)
        sent = self._obey(self.brain.admit_waiting(now), now)
        self.brain.experience.study()  # as the router does
        return sent

    def tick(self, now: float) -> Iterable[Sent]:
        return self._obey(self.brain.tick(now), now)
