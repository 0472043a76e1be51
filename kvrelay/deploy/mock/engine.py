"""Runs one simulated engine by the real clock: steps last as long as they would, and tokens come out when they end.

A step that is woken late does not delay the next one: mock engines keep their pace on a busy machine, up to a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.deploy.mock.scheduler import Scheduler
from kvrelay.deploy.mock.sequence import Sequence

CATCH_UP_S = 0.05
"""What an engine makes up for at most; beyond, the machine is too slow for it and it shows."""
_LAYERS_PER_S = 1000.0

Took = Callable[[Sequence, int], None]
"""Takes a token that was written."""


class Engine:
    """A scheduler and the time."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.slow = 1.0
        """Each step takes so many times as long."""
        self.least_s = 0.0
        """No step is shorter."""
        self._clock = clock
        self._free_s = 0.0
        """When the last step was to end."""
        self._news = asyncio.Event()
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._takers: dict[Sequence, Took] = {}
        self._steps = 0
        self._began_s: float | None = None
        """When the present step began; None between two steps."""

    def __repr__(self) -> str:
        state = "steps" if self._may_step.is_set() else "hangs"
        return f"<Engine {state}, {self.scheduler!r}>"

    def hang(self, on: bool) -> None:
        """Take no step from now on, or go on."""
        (self._may_step.clear if on else self._may_step.set)()

    def progress(self) -> int:
        """Grows while it steps, also within a long step, as that of an engine that counts layers."""
        steps = self._began_s is not None and self._may_step.is_set()
        layers = round(_LAYERS_PER_S * (self._clock() - (self._began_s or 0.0))) if steps else 0
        return self._steps + layers

    def wake(self) -> None:
        """There may be something to do."""
        self._news.set()

    def submit(self, sequence: Sequence, took: Took) -> None:
        self._takers[sequence] = took
        self.scheduler.add(sequence)
        self.wake()

    def cancel(self, sequence: Sequence) -> None:
        """Nobody waits for it any more; harmless for one that has ended."""
        if self._takers.pop(sequence, None) is not None:
            self.scheduler.abort(sequence, self._clock())
            self.wake()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await self._may_step.wait()
            self._news.clear()
            begins_s = max(self._free_s, self._clock() - CATCH_UP_S)
            step = self.scheduler.plan(begins_s)
            if step is None:
                await self._wait(self.scheduler.wake_s())
                self._free_s = self._clock()  # an idle engine has nothing to catch up with
                continue
            seconds = max(self.least_s, self.slow * step.seconds)
            self._free_s, self._began_s = begins_s + seconds, self._clock()
            await asyncio.sleep(max(0.0, self._free_s - self._clock()))
            await self._may_step.wait()
            self._steps, self._began_s = self.progress() + 1, None
            for sequence, token in self.scheduler.complete(step, self._free_s):
                self._tell(sequence, token)

    async def _wait(self, until_s: float | None) -> None:
        try:
            async with asyncio.timeout(None if until_s is None else max(0.0, until_s - self._clock())):
                await self._news.wait()
        except TimeoutError:
            pass  # a load has ended

    def _tell(self, sequence: Sequence, token: int) -> None:
        took = self._takers.get(sequence)
        if took is not None:
            took(sequence, token)
        if sequence.ending is not None:
            self._takers.pop(sequence, None)
