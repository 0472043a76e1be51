"""Wall clocks that jump: nothing that waits, expires or is put in order may ask one."""

from __future__ import annotations

import ast
import asyncio
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvrelay
from kvrelay.config import RouterConfig
from kvrelay.deploy.chaos.clock import JUMP_S, ClockVictims
from kvrelay.deploy.chaos.script import Deed
from kvrelay.deploy.mock.faults import Faults
from kvrelay.deploy.tiny import TinyShape, make_tiny
from kvrelay.errors import Lost
from tests.deploy.mock.test_mock_cluster import Mocks, mocked, prompt
from tests.patience import until

ROOT = Path(kvrelay.__file__).parent
WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.strftime", "time.ctime"}
WALL |= {"datetime.now", "datetime.utcnow", "datetime.datetime.now", "datetime.datetime.utcnow"}
SHOWN = {
    "deploy/mock/api.py": "`created` of an answer, as vLLM has it",
    "router/template.py": "a chat template may ask for the date",
    "deploy/chaos/clock.py": "it is what sets the clock",
}
"""Where the time of day is told to people, and why."""


def wall_clocks(tree: ast.AST) -> Iterator[str]:
    """Names of wall clocks that are read or handed on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL:
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{each.name}" for each in node.names if f"time.{each.name}" in WALL)


@pytest.mark.slow
def test_only_what_people_read_comes_from_a_wall_clock() -> None:
    readers = {
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if list(wall_clocks(ast.parse(path.read_text())))
    }
    assert readers == set(SHOWN)


@pytest.mark.parametrize("line", ["time.time()", "end = time.time", "from time import time_ns", "datetime.now()"])
def test_every_way_to_read_one_is_found(line: str) -> None:
    assert list(wall_clocks(ast.parse(line)))


class Wall:
    """A clock that a test may set."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def read(self) -> float:
        return self.now_s

    def set(self, now_s: float) -> None:
        self.now_s = now_s


async def test_a_clock_jumps_back_by_hours_and_is_right_again() -> None:
    wall = Wall()
    victims = ClockVictims(wall.read, wall.set)
    await victims.begin()
    assert wall.now_s == 1e9
    await victims.hurt("clock", Deed.CLOCK)
    assert wall.now_s == 1e9 + JUMP_S
    await victims.mend("clock")
    assert 0 <= wall.now_s - 1e9 < 60
    right_s = wall.now_s
    await victims.end()
    assert wall.now_s == right_s, "it is mended once"


async def test_whoever_may_not_set_the_clock_is_told_before_anything_is_broken() -> None:
    def refuse(_: float) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with pytest.raises(Lost, match="run this as root"):
        await ClockVictims(time.time, refuse).begin()


# ---------------------------------------------------------------- a cluster


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", TinyShape(max_positions=8192))


async def goes_on(mocks: Mocks, jumps: Iterator[None]) -> None:
    """Streams are right and nobody is called dead while ``jumps`` happen, and a death in between is noticed."""
    numbers = iter(range(100))
    for _ in jumps:
        answers = await asyncio.gather(*(mocks.stream(prompt(next(numbers)), 12) for _ in range(4)))
        assert all(last == b"data: [DONE]" for _, last in answers)
        assert all(mocks.cluster.is_ready(name) for name in mocks.node.workers)
    assert not await mocks.cluster.metric("kvrelay_resumes_total"), "no stream was taken for lost"
    mocks.suffer("decode-0", dead=True)
    await until(lambda: not mocks.cluster.is_ready("decode-0"))


@pytest.mark.slow
async def test_a_router_whose_clock_jumps_calls_nobody_dead_and_notices_deaths(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, off_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + off_s[0])

    def jumps() -> Iterator[None]:
        for off_s[0] in (9e4, -9e4, 1e9, 0.0):
            yield

    async with mocked(tiny, RouterConfig(port=0, control_port=0)) as mocks:
        await goes_on(mocks, jumps())


@pytest.mark.slow
async def test_workers_with_clocks_of_their_own_are_as_alive_as_others(tiny: Path) -> None:
    async with mocked(tiny, RouterConfig(port=0, control_port=0)) as mocks:

        def jumps() -> Iterator[None]:
            for off_s in (9e4, -9e4):
                for name in mocks.node.workers:
                    mocks.worker(name).suffer(Faults(clock_s=off_s))
                yield

        await goes_on(mocks, jumps())
