"""How long the steps of a simulated engine last."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvrelay.deploy.mock.engine import Engine
from kvrelay.deploy.mock.scheduler import Scheduler, Step
from kvrelay.deploy.mock.sequence import Sequence
from tests.patience import until


class OneStep:
    """Has one step of a millisecond."""

    def __init__(self) -> None:
        self.begun_s: float | None = None
        self.ended_s: float | None = None

    def plan(self, now: float) -> Step | None:
        if self.begun_s is not None:
            return None
        self.begun_s = now
        return Step([], now, 0.001)

    def wake_s(self) -> float | None:
        return None

    def complete(self, _: Step, now: float) -> list[tuple[Sequence, int]]:
        self.ended_s = now
        return []


@pytest.mark.parametrize(
    ("slow", "least_s", "took_s"), [(1, 0, 0.001), (20, 0, 0.02), (1, 0.03, 0.03), (20, 0.01, 0.02)]
)
async def test_a_step_is_as_slow_as_is_asked_for_and_no_shorter(slow: float, least_s: float, took_s: float) -> None:
    scheduler = OneStep()
    engine = Engine(cast(Scheduler, scheduler), asyncio.get_running_loop().time)
    engine.slow, engine.least_s = slow, least_s
    running = asyncio.create_task(engine.run())
    await until(lambda: scheduler.ended_s is not None)
    running.cancel()
    assert scheduler.begun_s is not None
    assert scheduler.ended_s is not None
    assert scheduler.ended_s - scheduler.begun_s == pytest.approx(took_s)
