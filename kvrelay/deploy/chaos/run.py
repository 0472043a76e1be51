"""Asks and breaks at the same time, mends everything, and reports. It must never report before all clients ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator

import aiohttp

from kvrelay.deploy.chaos.clients import Clients, questions
from kvrelay.deploy.chaos.lateness import Lateness
from kvrelay.deploy.chaos.leaks import held
from kvrelay.deploy.chaos.mending import Unmended, in_time, to_its_end
from kvrelay.deploy.chaos.script import OF_CLIENTS, Deed, Event, Script
from kvrelay.deploy.chaos.verdict import Tally, Verdict
from kvrelay.deploy.chaos.victims import Victims
from kvrelay.errors import Lost
from kvrelay.types import Value

_ROUTER = "router"
"""A kind of target."""


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
    """What the clients of one chaos run saw, and what was done to the cluster."""

    seed: int
    deeds: dict[str, int]
    """How often each was done, by kind of deed and of target."""
    streams: dict[str, int]
    """Requests underway when something was done: the least, the median, the most."""
    verdicts: dict[str, int]
    causes: dict[str, int]
    """Why requests were not answered that were refused, ended early or cut off, in the words of their answers."""
    longest_pause_s: dict[str, float]
    """Longest pauses of right answers, by quantile."""
    late_s: float
    """Longest time for which the clients themselves were held up: their pauses may be as much too long."""
    held: list[str]
    """Metrics that show something held, at rest."""
    failures: list[str]
    broken: list[str]
    """What could not be mended."""

    @property
    def is_good(self) -> bool:
        """No answer was wrong, hung or was cut off without a reason; nothing is held or still broken."""
        return not self.failures and not self.held and not self.broken


async def wreak(
    http: aiohttp.ClientSession,
    url: str,
    victims: Victims,
    plan: ChaosPlan,
    told: Callable[[Event | Unmended], None] = lambda event: None,
) -> Outcome:
    """Break the cluster at ``url``; ``told`` hears of each event, and of whatever is broken at the end. However this
    ends, each thing that was broken was tried to be mended. Raises ``Lost`` when it does not serve."""
    asked = questions(plan.questions, plan.seed, words=plan.words, tokens=plan.tokens)
    clients = Clients(http, url, asked, hung_s=plan.hung_s)
    targets = await victims.targets()
    await clients.learn()
    script = Script(targets, plan.seed, every_s=plan.every_s, lasts_s=plan.lasts_s)
    breaker = Breaker(victims, clients, random.Random(plan.seed), told)
    async with Lateness() as late, clients:
        try:
            await victims.begin()
            clients.start(plan.streams, plan.seed, plan.ramp_s)
            await asyncio.sleep(plan.ramp_s)
            for _ in range(plan.events):
                event = script.next()
                await asyncio.sleep(event.after_s)
                told(event)
                await breaker.do(event)
        finally:
            await to_its_end(breaker.end())
    kinds = {target.name: target.kind for target in targets}
    tally = clients.tally
    return Outcome(
        seed=plan.seed,
        deeds=dict(Counter(_label(event, kinds) for event in breaker.done)),
        streams=_spread(breaker.streams),
        verdicts={verdict.value: count for verdict, count in sorted(tally.verdicts.items())},
        causes=dict(tally.causes.most_common()),
        longest_pause_s={f"p{100 * share:g}": round(tally.pause_s(share), 3) for share in (0.5, 0.9, 0.99, 1.0)},
        late_s=round(late.worst_s, 3),
        held=await held(http, url, plan.rest_s),
        failures=[*tally.failures, *_cut_off(tally, {kinds[event.target] for event in breaker.done if event.target})],
        broken=[str(each) for each in breaker.broken],
    )


def _cut_off(tally: Tally, hurt: set[str]) -> Iterator[str]:
    """A connection breaks only with its router; ``hurt`` are kinds of things."""
    if (cut := tally.verdicts[Verdict.CUT]) and _ROUTER not in hurt:
        yield f"{cut} answers were cut off without an error, and nothing was done to a router"


def _spread(counts: list[int]) -> dict[str, int]:
    ordered = sorted(counts) or [0]
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}


def _label(event: Event, kinds: dict[str, str]) -> str:
    return f"{event.deed} {kinds[event.target]}" if event.target else event.deed.value


class Breaker:
    """Does events, and undoes each when its time is over."""

    def __init__(
        self, victims: Victims, clients: Clients, dice: random.Random, told: Callable[[Unmended], None]
    ) -> None:
        """``told`` hears of what is still broken after the end."""
        self._victims = victims
        self._clients = clients
        self._dice = dice
        self._told = told
        self._over = asyncio.Event()
        self._mending: set[asyncio.Task[None]] = set()
        self.broken: list[Unmended] = []
        """After the end."""
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
        try:
            await self._victims.hurt(event.target, event.deed)
        except Lost:
            await self._mend(event.target)  # what was done of it before
            return
        self.done.append(event)
        mending = asyncio.create_task(self._mend_later(event))
        self._mending.add(mending)
        mending.add_done_callback(self._mending.discard)

    def _to_a_client(self, event: Event) -> bool:
        if event.deed is Deed.SLOW_READER:
            return self._clients.slow_one(self._dice, event.lasts_s)
        return self._clients.cancel_one(self._dice)

    async def _mend_later(self, event: Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(event.lasts_s):
                await self._over.wait()
        await self._mend(event.target)

    async def _mend(self, name: str) -> None:
        with contextlib.suppress(Lost):  # it is tried again at the end
            await in_time(self._victims.mend(name))

    async def end(self) -> None:
        """Nothing stays broken, or ``told`` hears of it. Nobody is cancelled in the middle of a mend."""
        self._clients.stopped = True
        self._over.set()
        await asyncio.gather(*self._mending, return_exceptions=True)
        self.broken = await self._victims.end()
        for each in self.broken:
            self._told(each)
