"""Asks and breaks at the same time, mends everything, and reports. It must never report before all clients ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable

import aiohttp

from kvrelay.deploy.chaos.clients import Clients, questions
from kvrelay.deploy.chaos.leaks import held
from kvrelay.deploy.chaos.script import OF_CLIENTS, Deed, Event, Script
from kvrelay.deploy.chaos.victims import Victims
from kvrelay.errors import Lost
from kvrelay.types import Value


class ChaosPlan(Value, frozen=True, kw_only=True):
    """How much is broken, and who asks meanwhile."""

    events: int = 100
    streams: int = 16
    seed: int = 0
    ramp_s: float = 0.0
    """Nothing is broken before all streams have begun, so long after the first one."""
    every_s: float = 0.3
    """Mean time between two events."""
    lasts_s: tuple[float, float] = (0.5, 4.0)
    """For how long something stays broken."""
    questions: int = 24
    words: tuple[int, int] = (20, 900)
    tokens: tuple[int, int] = (8, 60)
    hung_s: float = 30.0
    rest_s: float = 40.0
    """After so long without a request nothing may be held."""


class Outcome(Value, frozen=True, kw_only=True):
    """What was seen."""

    seed: int
    deeds: dict[str, int]
    """By kind of deed and of target."""
    streams: dict[str, int]
    """Requests underway when something was done: the least, the median, the most."""
    verdicts: dict[str, int]
    longest_pause_s: dict[str, float]
    """Of right answers, by quantile."""
    held: list[str]
    """Metrics that show something held, at rest."""
    failures: list[str]

    @property
    def is_good(self) -> bool:
        """No answer was wrong, none hung, nothing is held."""
        return not self.failures and not self.held


async def wreak(
    http: aiohttp.ClientSession,
    url: str,
    victims: Victims,
    plan: ChaosPlan,
    told: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Break the cluster at ``url``; ``told`` hears of each event. Raises ``Lost`` when it does not serve."""
    asked = questions(plan.questions, plan.seed, words=plan.words, tokens=plan.tokens)
    clients = Clients(http, url, asked, hung_s=plan.hung_s)
    targets = await victims.targets()
    await clients.learn()
    script = Script(targets, plan.seed, every_s=plan.every_s, lasts_s=plan.lasts_s)
    await victims.begin()
    asking = asyncio.create_task(clients.run(plan.streams, plan.seed, plan.ramp_s))
    breaker = Breaker(victims, clients, random.Random(plan.seed))
    try:
        await asyncio.sleep(plan.ramp_s)
        for _ in range(plan.events):
            event = script.next()
            await asyncio.sleep(event.after_s)
            told(event)
            await breaker.do(event)
    finally:
        clients.stopped = True
        await breaker.mend_all()
        await victims.end()
    await asking
    kinds = {target.name: target.kind for target in targets}
    tally = clients.tally
    return Outcome(
        seed=plan.seed,
        deeds=dict(Counter(_label(event, kinds) for event in breaker.done)),
        streams=_spread(breaker.streams),
        verdicts={verdict.value: count for verdict, count in sorted(tally.verdicts.items())},
        longest_pause_s={f"p{100 * share:g}": round(tally.pause_s(share), 3) for share in (0.5, 0.9, 0.99, 1.0)},
        held=await held(http, url, plan.rest_s),
        failures=tally.failures,
    )


def _spread(counts: list[int]) -> dict[str, int]:
    ordered = sorted(counts) or [0]
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}


def _label(event: Event, kinds: dict[str, str]) -> str:
    return f"{event.deed} {kinds[event.target]}" if event.target else event.deed.value


class Breaker:
    """Does events, and undoes each when its time is over."""

    def __init__(self, victims: Victims, clients: Clients, dice: random.Random) -> None:
        self._victims = victims
        self._clients = clients
        self._dice = dice
        self._mending: dict[str, asyncio.Task[None]] = {}
        self.done: list[Event] = []
        self.streams: list[int] = []
        """Requests that were underway at each event."""

    def __repr__(self) -> str:
        return f"<Breaker {len(self.done)} events, {len(self._mending)} not mended>"

    async def do(self, event: Event) -> None:
        """A target that is not there at the moment is spared."""
        self.streams.append(self._clients.streams)
        if event.deed in OF_CLIENTS:
            if self._to_a_client(event):
                self.done.append(event)
            return
        with contextlib.suppress(Lost):
            await self._victims.hurt(event.target, event.deed)
            self.done.append(event)
            self._mending[event.target] = asyncio.create_task(self._mend_later(event))

    def _to_a_client(self, event: Event) -> bool:
        if event.deed is Deed.SLOW_READER:
            return self._clients.slow_one(self._dice, event.lasts_s)
        return self._clients.cancel_one(self._dice)

    async def _mend_later(self, event: Event) -> None:
        await asyncio.sleep(event.lasts_s)
        with contextlib.suppress(Lost):
            await self._victims.mend(event.target)
            self._mending.pop(event.target, None)

    async def mend_all(self) -> None:
        """Nothing stays broken."""
        broken, self._mending = self._mending, {}
        for name, mending in broken.items():
            mending.cancel()
            await asyncio.gather(mending, return_exceptions=True)
            await self._victims.mend(name)
