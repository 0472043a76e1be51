"""However breaking things ends, each of them is mended that can be, and the others are named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig
from kvrelay.deploy.chaos import mending, processes
from kvrelay.deploy.chaos.disk import DiskVictims
from kvrelay.deploy.chaos.mending import Unmended, mend_each, to_its_end
from kvrelay.deploy.chaos.processes import ProcessVictims
from kvrelay.deploy.chaos.run import ChaosPlan, wreak
from kvrelay.deploy.chaos.script import Deed, Event, Target
from kvrelay.deploy.chaos.victims import MockVictims, Together
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.process import Child
from kvrelay.errors import Lost, Refused
from tests.patience import PATIENCE_S, until


class Things:
    """Things of one kind, some of which cannot be mended."""

    def __init__(self, *names: str, stuck: tuple[str, ...] = (), halfway: bool = False) -> None:
        self._names = names
        self._stuck = stuck
        self._halfway = halfway
        self.broken: set[str] = set()

    async def targets(self) -> list[Target]:
        kinds = ("store", "disk", "machine")  # of each of which the only one may be broken
        return [
            Target(name=name, kind=kind, deeds=(Deed.STOP,)) for name, kind in zip(self._names, kinds, strict=False)
        ]

    async def begin(self) -> None: ...

    async def hurt(self, name: str, deed: Deed) -> None:
        self.broken.add(name)
        if self._halfway:
            raise Lost(f"{name} is away")

    async def mend(self, name: str) -> None:
        if name in self._stuck:
            raise Lost("it will not")
        self.broken.discard(name)

    async def end(self) -> list[Unmended]:
        return await mend_each(self.broken, self.mend, lambda name: f"turn {name} over")


def stuck(name: str) -> Unmended:
    return Unmended(name=name, why="it will not", by_hand=f"turn {name} over")


async def test_what_cannot_be_mended_keeps_nothing_else_from_it_and_is_told_with_what_to_do() -> None:
    first, second = Things("a", "b", "c", stuck=("a",)), Things("d", "e", stuck=("e",))
    together = Together([first, second])
    for target in await together.targets():
        await together.hurt(target.name, Deed.STOP)
    assert sorted(await together.end(), key=str) == [stuck("a"), stuck("e")]
    assert (first.broken, second.broken) == ({"a"}, {"e"})
    assert str(stuck("a")) == "a is still broken (it will not). To mend it by hand: turn a over"


@pytest.mark.parametrize("error", [Lost("x"), Refused("x"), OSError(5, "x"), KeyError("x")])
async def test_whatever_goes_wrong_with_one_the_others_are_mended(error: Exception) -> None:
    mended = []

    async def mend(name: str) -> None:
        if name == "bad":
            raise error
        mended.append(name)

    (left,) = await mend_each(["bad", "good"], mend, str.upper)
    assert (left.name, left.by_hand, mended) == ("bad", "BAD", ["good"])
    assert "x" in left.why


async def test_who_hangs_while_it_is_mended_is_told_like_who_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "MEND_S", 0.01)

    async def hang(_: str) -> None:
        await asyncio.Event().wait()

    (left,) = await mend_each(["h"], hang, str)
    assert left.why == "nothing came of it in 0.01 s"


async def test_what_mends_goes_on_while_its_caller_is_cancelled_again_and_again() -> None:
    may_end, ended = asyncio.Event(), []

    async def work() -> None:
        await may_end.wait()
        ended.append(True)

    task = asyncio.create_task(to_its_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


# ---------------------------------------------------------------- a run


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """Answers every prompt at once, and has nothing to hold."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(request: web.Request) -> web.Response:
        answer = {"choices": [{"text": "x"}]}
        if (await request.json())["stream"]:
            return web.Response(body=b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
        return web.json_response(answer)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="")

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no valid API key"}}, status=401)

    app = web.Application()
    app.router.add_get("/locked/v1/models", refuse)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_cluster_that_wants_a_key_says_so_before_anything_is_broken(server: str) -> None:
    things = Things("a")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(Lost, match=r"wants an API key.*--api-key KEY or KVRELAY_API_KEY"):
            await wreak(http, f"{server}/locked", things, plan(30), list[Event | Unmended]().append)
    assert things.broken == set()


def plan(events: int) -> ChaosPlan:
    return ChaosPlan(events=events, streams=1, seed=3, every_s=0.01, lasts_s=(30.0, 30.0), questions=1, rest_s=0.0)


async def test_a_run_that_leaves_something_broken_says_so_and_is_not_good(server: str) -> None:
    things, told = Things("a", "b", stuck=("a",)), list[Event | Unmended]()
    async with aiohttp.ClientSession() as http:
        outcome = await wreak(http, server, things, plan(30), told.append)
    assert (outcome.deeds["stop store"], outcome.deeds["stop disk"]) == (1, 1)
    assert things.broken == {"a"}
    assert told[-1] == stuck("a")
    assert (outcome.broken, outcome.is_good) == ([str(stuck("a"))], False)


async def test_a_run_that_is_cancelled_mends_everything_and_names_the_rest(server: str) -> None:
    things, left = Things("a", "b", stuck=("a",)), []

    def told(what: Event | Unmended) -> None:
        if isinstance(what, Unmended):
            left.append(what)

    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(wreak(http, server, things, plan(10_000), told))
        await until(lambda: things.broken == {"a", "b"})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (things.broken, left) == ({"a"}, [stuck("a")])


async def test_who_is_hurt_only_in_part_is_mended_at_once(server: str) -> None:
    things = Things("a", halfway=True)
    async with aiohttp.ClientSession() as http:
        outcome = await wreak(http, server, things, plan(20))
    assert "stop store" not in outcome.deeds
    assert not things.broken


# ---------------------------------------------------------------- kinds of things


class Stopped:
    """A process that takes signals, or does not."""

    def __init__(self, pid: int, error: psutil.Error | None = None) -> None:
        self.pid = pid
        self.taken: list[int] = []
        self._error = error

    def children(self, recursive: bool) -> list[Stopped]:
        return []

    def send_signal(self, number: int) -> None:
        if number == signal.SIGCONT and self._error is not None:
            raise self._error
        self.taken.append(number)


async def test_stopped_processes_go_on_although_one_of_them_may_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, foreign, gone = Stopped(1), Stopped(2, psutil.AccessDenied(2)), Stopped(3, psutil.NoSuchProcess(3))
    found = [("p", "prefill", foreign), ("d", "decode", mine), ("e", "decode", gone)]
    monkeypatch.setattr(processes, "members", lambda: found)
    victims = ProcessVictims([Deed.STOP])
    for name, _, _ in found:
        await victims.hurt(name, Deed.STOP)
    (left,) = await victims.end()
    assert (left.name, left.by_hand) == ("p", "kill -CONT 2")
    assert mine.taken == [signal.SIGSTOP, signal.SIGCONT]
    assert await victims.end() == [left], "it is tried again"


async def test_a_file_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        st_dev = -1

    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    monkeypatch.setattr(Path, "stat", lambda self: Elsewhere if self == Path("/") else os.stat(self))
    victims = DiskVictims(tmp_path)
    (tmp_path / "kvrelay-chaos.full").mkdir()
    (left,) = await victims.end()
    assert left.by_hand == f"rm -f {tmp_path}/kvrelay-chaos.full"


# ---------------------------------------------------------------- processes


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    monkeypatch.delenv("KVRELAY_RUN_DIR", raising=False)
    config = Config(
        router=RouterConfig(port=0, control_port=0),
        mock=MockConfig(enabled=True),
        cluster=ClusterConfig(prefill=2, decode=2),
    )
    async with LocalCluster(config) as made:
        yield made


async def chaos(cluster: LocalCluster) -> Child:
    """Breaks its mock workers until it is stopped; nothing is mended before that by itself."""
    route = ("--url", cluster.url, "--port", str(cluster.config.mock.control_port), "--key-file", str(cluster.run.key))
    flags = (*route, "--events", "100000", "--streams", "2", "--every-s", "0.05", "--seed", "5")
    command = [sys.executable, "-m", "kvrelay", "chaos", *flags]
    child = await Child.start("chaos", command, {**os.environ, "COLUMNS": "200"}, asyncio.subprocess.PIPE)
    assert child.output is not None
    broken = set[str]()
    while len(broken) < 2:
        line = (await asyncio.wait_for(child.output.readline(), PATIENCE_S)).decode()
        assert line, "it ended"
        broken |= set(re.findall(r"((?:prefill|decode)-\d) for", line))
    return child


async def end(child: Child, number: signal.Signals) -> tuple[int, str]:
    os.kill(child.pid, number)
    assert child.output is not None
    try:
        said = await asyncio.wait_for(child.output.read(), PATIENCE_S)
        return await child.wait(), said.decode()
    finally:
        await child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_command_that_is_stopped_leaves_all_workers_well(cluster: LocalCluster, number: signal.Signals) -> None:
    status, said = await end(await chaos(cluster), number)
    assert status == 130, said
    async with aiohttp.ClientSession() as http:
        shown = await MockVictims(
            http, f"http://127.0.0.1:{cluster.config.mock.control_port}", cluster.engine_key
        )._ask("GET", "")
    faults = {each["name"]: each["faults"] for each in shown}
    assert len(faults) == 5
    for name, given in faults.items():
        assert not any(given[key] for key in ("dead", "hang", "mute", "full", "clock_s")), name


@pytest.mark.slow
async def test_a_command_that_cannot_mend_fails_and_says_what_mends_by_hand(cluster: LocalCluster) -> None:
    running = await chaos(cluster)
    await cluster.kill("mock")
    status, said = await end(running, signal.SIGTERM)
    assert status == 1, said
    port = cluster.config.mock.control_port
    assert re.search(rf"To mend it by hand: kvrelay fault (prefill|decode)-\d none --port {port} --key-file KEY", said)
