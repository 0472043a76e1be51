"""Which path the batches to one peer take: the fastest that proved itself, then the next, the pushes' own link last.

A path that was lost is opened and tested again after a while; it must never carry a page before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kvrelay.errors import KvrelayError, Lost, Refused
from kvrelay.protocol.client import LinkReport
from kvrelay.protocol.peer import Meet, Met
from kvrelay.store.batch import Batch
from kvrelay.store.paths.line import Line
from kvrelay.store.paths.path import Path
from kvrelay.store.paths.trial import Score, prove
from kvrelay.types import Transport

RETRY_S = 5.0
"""Pause before a path that was lost, or failed its test, is tried again."""
MAX_RETRY_S = 300.0
RETEST_S = 60.0
"""Between two tests of a path; those of an idle link cost about 10 ms."""
TRIAL_S = 5.0
"""Longest test; a healthy path takes milliseconds."""
_TOO_LONG = f"its test took longer than {TRIAL_S:g} s"

Opener = Callable[[Line, Met], Awaitable[Path]]
Openers = Mapping[Transport, Opener | str]
"""How to open each path that may be taken, or why it cannot be opened here, whatever the peer offers."""


@dataclass(frozen=True)
class Proven:
    """A path and how fast it is."""

    path: Path
    score: Score


class Paths:
    """All paths to one peer."""

    def __init__(self, line: Line, last: Path, openers: Openers, clock: Callable[[], float]) -> None:
        self._line = line
        self._last = last
        self._openers = {transport: opener for transport, opener in openers.items() if not isinstance(opener, str)}
        self._clock = clock
        self._proven: list[Proven] = []
        self._problems: dict[Transport, str] = {
            transport: opener if isinstance(opener, str) else "not tested yet" for transport, opener in openers.items()
        }
        self._lost = asyncio.Event()
        self._carrying = 0

    def __repr__(self) -> str:
        return f"<Paths {[each.path for each in self._proven]}, then {self._last!r}>"

    @property
    def best(self) -> Proven | None:
        """The path that is taken now; None while only the link of the pushes is known to work."""
        return self._proven[0] if self._proven else None

    @property
    def wants_slots(self) -> bool:
        """Whether a path is known that writes into the peer's arena."""
        return any(each.path.transport is not Transport.TCP for each in self._proven)

    @property
    def stream_bytes_per_s(self) -> float | None:
        """Speed of the best path when bytes can be encoded for it; None when they cannot, or when it is not known."""
        best = self.best
        return best.score.bytes_per_s if best is not None and best.path.transport is Transport.TCP else None

    async def run(self) -> None:
        """Open and test what is missing, and test the others again now and then, until cancelled."""
        pause_s = RETRY_S
        while True:
            is_complete = await self._open_all()
            pause_s = RETEST_S if is_complete else min(2 * pause_s, MAX_RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._lost.wait()
            if self._lost.is_set():
                self._lost.clear()
                pause_s = RETRY_S
                await asyncio.sleep(pause_s)
            elif not self._carrying:
                await self._test_again()

    async def _open_all(self) -> bool:
        """One after the other: a test beside another would measure both. False when trying again may help."""
        try:
            met = await self._line.ask(lambda serial: Meet(serial=serial), Met)
        except Lost:
            return True  # a peer that offers nothing: its own link will tell when it is gone
        is_complete = True
        proven = {each.path.transport for each in self._proven}
        for transport in [each for each in self._openers if each not in proven]:
            if transport not in met.transports:
                self._problems[transport] = "the peer does not offer it"
                continue
            try:
                async with asyncio.timeout(TRIAL_S):
                    await self._open(transport, met)
            except (KvrelayError, TimeoutError) as error:
                self._problems[transport] = str(error) or _TOO_LONG
                is_complete = False
        return is_complete

    async def _open(self, transport: Transport, met: Met) -> None:
        path = await self._openers[transport](self._line, met)
        try:
            score = await prove(path, self._clock)
        except BaseException:
            path.close()
            raise
        self._rank([*self._proven, Proven(path, score)])
        self._problems.pop(transport, None)

    def _rank(self, proven: list[Proven]) -> None:
        self._proven = sorted(proven, key=lambda each: each.score.seconds())

    async def _test_again(self) -> None:
        """What was measured when everything started says little: both machines were busy."""
        for path in [each.path for each in self._proven]:
            try:
                async with asyncio.timeout(TRIAL_S):
                    score = await prove(path, self._clock)
            except (KvrelayError, TimeoutError) as error:
                self._give_up(path, str(error) or _TOO_LONG)
            else:
                self._rank([Proven(path, score) if each.path is path else each for each in self._proven])

    async def carry(self, batch: Batch) -> int:
        """Carry ``batch`` over the best path that takes it; how often it was begun again. Raises ``Lost``."""
        self._carrying += 1
        try:
            return await self._carry(batch)
        finally:
            self._carrying -= 1

    async def _carry(self, batch: Batch) -> int:
        lost = 0
        for path in [*[each.path for each in self._proven if each.path.takes(batch)], self._last]:
            try:
                return lost + await path.carry(batch)
            except Refused:
                lost += 1  # others may go that way
            except KvrelayError as error:
                lost += 1
                self._give_up(path, str(error))
        raise Lost(f"no path to {self._line.link.peer} is left")

    def _give_up(self, path: Path, problem: str) -> None:
        path.close()
        if any(each.path is path for each in self._proven):
            self._proven = [each for each in self._proven if each.path is not path]
            self._problems[path.transport] = problem
            self._lost.set()

    def reports(self, peer: str) -> list[LinkReport]:
        """How fast each path is, and what is wrong with those that are not used."""
        good = [
            LinkReport(
                peer=peer,
                transport=each.path.transport,
                rank=rank,
                bytes_per_s=each.score.bytes_per_s,
                latency_s=each.score.latency_s,
            )
            for rank, each in enumerate(self._proven, 1)
        ]
        return good + [
            LinkReport(peer=peer, transport=transport, problem=problem) for transport, problem in self._problems.items()
        ]

    def close(self) -> None:
        for each in self._proven:
            each.path.close()
        self._proven = []
        self._last.close()
