"""Finds routers that run and do not answer, and ends them so that they are started again: of those that share a port, a
stopped one would go on being given its part of the connections. It must never end one unless another one answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from kvrelay.deploy.crew import Crew
from kvrelay.deploy.members import Member
from kvrelay.deploy.readiness import answers

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
STILL_LOOKS = 4
"""Looks in a row at which a process that was asked has not run for a moment since the one before: a busy one has, and
so has one that waits for its turn on a loaded machine."""
STARTING_LOOKS = 20
"""The same of one that is not ready: nothing wakes it, and what it reads of a slow disk may take long."""
MOST_MISSED = 3
"""Questions in a row without an answer, each for as long as two handshakes may take, of one that does run."""


@dataclass
class Watched:
    """What is known of one router's process that is watched."""

    asking: asyncio.Task[bool]
    signs: tuple[float, ...] = ()
    still: int = 0
    """Looks in a row without a sign that it ran."""
    missed: int = 0
    """Questions in a row."""
    answers: bool = False
    """The last question that is over was answered."""


class RouterWatch:
    """Asks each router of ``crew`` over its own control port, one question at a time."""

    def __init__(self, crew: Crew, key: bytes) -> None:
        self._crew = crew
        self._key = key
        self._watched: dict[int, Watched] = {}
        """Processes that are watched, by id."""

    def __repr__(self) -> str:
        return f"<RouterWatch of {len(self._watched)}>"

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await self.look(self._crew.routers())
        finally:
            await self.close()

    async def close(self) -> None:
        """Ask nothing any more."""
        await self._forget(list(self._watched))

    async def look(self, routers: list[Member]) -> None:
        """Once at each; whoever stands still is ended."""
        pids = {router.name: self._crew.pid(router.name) for router in routers}
        await self._forget(self._watched.keys() - set(pids.values()))
        serving = {router.name for router in self._crew.serving_routers()}
        for router in routers:
            self._see(router, pids[router.name])
        for router in routers:
            others = [self._watched[pid] for name, pid in pids.items() if name != router.name and name in serving]
            hangs = self._hangs(self._watched[pids[router.name]], is_ready=router.name in serving)
            is_same = self._crew.pid(router.name) == pids[router.name]
            if hangs and is_same and any(map(_vouches, others)):
                _log.warning("%s answers nothing any more: it is ended and started again", router.name)
                await self._crew.end(router.name)

    def _see(self, router: Member, pid: int) -> None:
        known = self._watched.get(pid)
        if known is None:
            self._watched[pid] = Watched(self._ask(router), signs_of(pid))
            return
        signs = signs_of(pid)
        known.still = known.still + 1 if signs == known.signs else 0
        known.signs = signs
        if known.asking.done():
            known.answers = known.asking.result()
            known.missed = 0 if known.answers else known.missed + 1
            known.still = 0 if known.answers else known.still
            known.asking = self._ask(router)

    def _ask(self, router: Member) -> asyncio.Task[bool]:
        return asyncio.create_task(answers(router.control, self._key))

    def _hangs(self, router: Watched, *, is_ready: bool) -> bool:
        if not is_ready:  # it may not listen yet
            return router.still >= STARTING_LOOKS
        return router.still >= STILL_LOOKS or router.missed >= MOST_MISSED

    async def _forget(self, pids: Iterable[int]) -> None:
        asked = [self._watched.pop(pid).asking for pid in pids]
        for asking in asked:
            asking.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def _vouches(other: Watched) -> bool:
    """It serves now. One that stands still may have answered just before, and be asked for seconds yet."""
    return other.answers and not other.missed and not other.still


def signs_of(pid: int) -> tuple[float, ...]:
    """Numbers of which at least one is another after the process has run for a moment: CPU seconds in steps of 10 ms,
    and how often it went to sleep or had to stand back."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu, switches = process.cpu_times(), process.num_ctx_switches()
    except psutil.Error:
        return ()
    return cpu.user, cpu.system, switches.voluntary, switches.involuntary
