"""Clusters of mock workers as processes: several on one machine, and members that are started again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.cli.draining import Routers
from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig
from kvrelay.deploy.crew import Crew
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.members import Kind, Member, RunDir
from kvrelay.deploy.ports import is_free
from kvrelay.deploy.process import Child
from kvrelay.deploy.readiness import lacking
from kvrelay.protocol.operator import AskReady, Ready
from tests.deploy.test_up import read_until
from tests.patience import PATIENCE_S, until

PORTS = 6
"""Just enough for two clusters of three each. Without claims, one pair of choices in 20 would be apart by chance."""
KEY = b"k" * 32


# ---------------------------------------------------------------- two at a time


def room(count: int) -> int:
    """The first of ``count`` free ports in a row."""
    return next(
        first
        for first in range(19_000 + os.getpid() % 500, 20_000 - count)
        if all(is_free("127.0.0.1", port) for port in range(first, first + count))
    )


async def start_up(first: int, run_dir: Path) -> Child:
    """``kvrelay up``, whose free ports are ``PORTS`` from ``first`` on."""
    run_dir.mkdir()
    (run_dir / "up.toml").write_text("[router]\ncontrol_port = 0\n")
    flags = ["up", "--mock", "2x2", "--time-scale", "0.05", "--port", "0", "--config", str(run_dir / "up.toml")]
    code = (
        "import runpy, sys; from kvrelay.deploy import ports; "
        f"ports._FIRST, ports._LAST = {first}, {first + PORTS - 1}; sys.argv[1:] = {flags!r}; "
        "runpy.run_module('kvrelay', run_name='__main__', alter_sys=True)"
    )
    environment = {**os.environ, "KVRELAY_RUN_DIR": str(run_dir / "r"), "COLUMNS": "200"}
    return await Child.start("up", [sys.executable, "-c", code], environment, asyncio.subprocess.PIPE)


@pytest.mark.slow
async def test_two_clusters_that_start_at_the_same_moment_both_come_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, first = tmp_path_factory.mktemp("run"), room(PORTS)
    ups = await asyncio.gather(*(start_up(first, folder / name) for name in "ab"))
    try:
        shown = await asyncio.gather(*(read_until(up, "Ctrl-C ends it") for up in ups))
    finally:
        await asyncio.gather(*(up.stop(grace_s=20) for up in ups))
    said = [(re.search(r"Serving at \S+:(\d+)", each), re.search(r"--port (\d+)", each)) for each in shown]
    ports = [int(match[1]) for pair in said for match in pair if match is not None]
    assert len(ports) == len(set(ports)) == 4
    assert all(first <= port < first + PORTS for port in ports)


# ---------------------------------------------------------------- started again


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = Config(
        router=RouterConfig(port=0, control_port=0, replicas=2),
        cluster=ClusterConfig(prefill=1, decode=2),
        mock=MockConfig(enabled=True, time_scale=0.05),
    )
    async with LocalCluster(config, run_dir=tmp_path_factory.mktemp("run")) as made:
        yield made


@pytest.mark.slow
async def test_a_member_is_started_again_while_a_worker_drains(cluster: LocalCluster) -> None:
    first, second = cluster.controls
    async with Routers([first], cluster.key) as routers:
        assert (await routers.drain("decode-1")).is_draining
    async with asyncio.timeout(PATIENCE_S):
        while not await drains(cluster, second):  # it hears of that from the worker, which was told then
            await asyncio.sleep(0.05)
    await cluster.restart("router")
    assert await drains(cluster, first), "it was not waited for, and is known"
    await cluster.restart("mock")
    assert not await drains(cluster, first), "it was started anew"


async def drains(cluster: LocalCluster, control: str) -> bool:
    async with Routers([control], cluster.key) as routers:
        return (await routers.remaining("decode-1")).is_draining


@pytest.mark.parametrize(
    ("expected", "or_draining", "answer"),
    [
        ({"a"}, set(), ""),
        ({"a"}, {"b"}, ""),
        ({"b"}, set(), "it lacks b"),
        ({"a", "c"}, {"b", "d"}, "it lacks c, d"),
    ],
)
async def test_who_drains_is_lacked_only_by_who_needs_it(
    expected: set[str], or_draining: set[str], answer: str
) -> None:
    assert await lacking_at(Ready(serving=True, why="", members=["a"], draining=["b"]), expected, or_draining) == answer


async def test_a_draining_worker_hides_no_other_reason_for_not_serving() -> None:
    said = Ready(serving=False, why="no decode worker is ready", members=["a"], draining=["b"])
    assert await lacking_at(said, {"a"}, {"b"}) == said.why


async def lacking_at(said: Ready, expected: set[str], or_draining: set[str]) -> str:
    """What is lacking at a router that says this."""

    async def serve(link: Channel) -> None:
        assert isinstance(await link.recv(), AskReady)
        await link.send(said)

    sock = bind_tcp("127.0.0.1", 0)
    listener = Listener(sock, KEY, receiver="router", purposes={"operator"}, serve=serve)
    running = asyncio.create_task(listener.run())
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    try:
        return await lacking(address, KEY, expected, or_draining=or_draining)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def crew_of_sleepers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    run = RunDir(folder)
    run.logs.mkdir()
    sleeper = property(lambda self: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(Member, "command", sleeper)
    return Crew(run, lambda name, progress: None)


@pytest.mark.parametrize("revived_first", [True, False])
async def test_a_router_that_died_is_started_once_whoever_wants_it_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revived_first: bool
) -> None:
    crew = crew_of_sleepers(tmp_path, monkeypatch)
    started: list[Child] = []
    start = Child.start

    async def counted(*arguments: Any) -> Child:
        started.append(await start(*arguments))
        return started[-1]

    monkeypatch.setattr(Child, "start", counted)
    try:
        for name in ("a", "b"):
            await crew.start(Member(name=name, kind=Kind.ROUTER, arguments=()))
        os.kill(crew.pid("b"), signal.SIGKILL)
        await until(lambda: len(crew.running()) == 1)
        crew.note_dead_routers(0.0)
        both = [crew.start_again("b", within_s=0.3), crew.revive("b", 1e9)]
        await asyncio.gather(*(reversed(both) if revived_first else both), return_exceptions=True)
        assert sum(child.running for child in started) == len(crew.running()) == 2
    finally:
        for child in started:
            await child.kill()


async def test_members_that_are_started_again_at_the_same_time_are_not_taken_for_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is between its old and its new process while somebody looks whether anybody died."""
    crew = crew_of_sleepers(tmp_path, monkeypatch)
    try:
        await crew.start(Member(name="a", kind=Kind.STORE, arguments=()))
        await crew.kill("a")
        again = asyncio.create_task(crew.start(crew.members["a"]))
        while not again.done():
            crew.raise_if_crashed()
            await asyncio.sleep(0)
        await until(crew.running)
    finally:
        await crew.stop()
