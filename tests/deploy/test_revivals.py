"""Tests of deploy/revivals.py and deploy/watch.py: routers that die often, and routers that stand still."""

from __future__ import annotations

import asyncio
import errno
import itertools
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvrelay import channel
from kvrelay.channel import Channel, Listener, bind_tcp
from kvrelay.deploy import watch
from kvrelay.deploy.crew import Crew
from kvrelay.deploy.members import Kind, Member, RunDir
from kvrelay.deploy.process import Child
from kvrelay.deploy.revivals import FIRST_PAUSE_S, LAST_PAUSE_S, MOST_DEATHS, SERVED_PAUSE_S, WINDOW_S, Revivals
from kvrelay.deploy.watch import MOST_MISSED, STARTING_LOOKS, STILL_LOOKS, RouterWatch
from kvrelay.errors import Lost
from kvrelay.protocol.operator import Ready
from tests.patience import PATIENCE_S, until

KEY = b"k" * 32


def test_the_pause_grows_for_one_that_does_not_come_to_serve_and_not_for_one_that_does() -> None:
    revivals = Revivals()
    assert [revivals.died("a", 0.0, served=False) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert [revivals.died("b", 0.0, served=True) for _ in range(9)] == [SERVED_PAUSE_S] * 9
    assert [revivals.died("a", 0.0, served=False) for _ in range(6)][-1] == LAST_PAUSE_S
    revivals.died("a", 0.0, served=True)
    assert revivals.died("a", 0.0, served=False) == 0.5


def test_the_first_death_in_a_while_is_followed_by_a_new_start_at_once() -> None:
    revivals = Revivals()
    assert revivals.died("a", 0.0, served=True) == 0.0
    assert revivals.died("b", WINDOW_S, served=True) == 0.0


def test_when_none_serves_all_begin_anew_unless_they_died_too_often() -> None:
    revivals = Revivals()
    for _ in range(MOST_DEATHS):
        assert revivals.may_begin_anew(0.0)
        revivals.died("a", 0.0, served=True)
    assert not revivals.may_begin_anew(0.0)
    assert revivals.may_begin_anew(WINDOW_S)


# ---------------------------------------------------------------- with processes


@pytest.fixture
async def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crew]:
    """Two routers that only say that they are ready; their control ports are this process's."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    made = Crew(run, lambda name, progress: None)
    code = "import time; print('kvrelay ready: as if'); time.sleep(600)"
    monkeypatch.setattr(Member, "command", property(lambda self: [sys.executable, "-c", code]))

    async def answer(link: Channel) -> None:
        await link.recv()
        await link.send(Ready(serving=True, why="", members=[]))

    sockets = [bind_tcp("127.0.0.1", 0) for _ in range(2)]
    listeners = [Listener(sock, KEY, receiver="router", purposes={"operator"}, serve=answer) for sock in sockets]
    answering = asyncio.create_task(listeners[0].run())  # the other one's callers are let in by the kernel alone
    for name, sock in zip(("router", "router-1"), sockets, strict=True):
        control = f"127.0.0.1:{sock.getsockname()[1]}"
        await made.start(Member(name=name, kind=Kind.ROUTER, arguments=(), control=control))
    try:
        await until(lambda: len(made.serving_routers()) == 2)
        yield made
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        sockets[1].close()
        await made.stop()


async def die(crew: Crew, name: str) -> None:
    process = psutil.Process(crew.pid(name))
    process.send_signal(signal.SIGKILL)
    await until(lambda: all(member.name != name for member in crew.running()))


async def look(crew: Crew, now: float) -> None:
    crew.note_dead_routers(now)
    crew.raise_if_crashed()
    await asyncio.gather(*(crew.revive(name, now) for name in crew.members))


async def let_router_1_wait(crew: Crew) -> None:
    """It died again, and has to wait a little."""
    for _ in range(2):
        await die(crew, "router-1")
        await look(crew, 0.0)
    assert [member.name for member in crew.routers()] == ["router"]


async def let_a_store_wait(crew: Crew) -> None:
    await crew.start(Member(name="store-0", kind=Kind.STORE, arguments=()))
    await die(crew, "store-0")
    crew._due_s["store-0"] = LAST_PAUSE_S


async def test_one_that_waits_is_started_after_its_pause_and_not_before(crew: Crew) -> None:
    await let_router_1_wait(crew)
    pause_s = crew._due_s["router-1"]
    assert pause_s in {FIRST_PAUSE_S, SERVED_PAUSE_S}
    for now, count in ((0.9 * pause_s, 1), (pause_s, 2)):
        await look(crew, now)
        assert len(crew.routers()) == count
    assert not crew._due_s


async def test_a_router_that_dies_ever_again_ends_nothing_while_another_one_serves(crew: Crew) -> None:
    now = 0.0
    for _ in range(MOST_DEATHS + 2):
        await die(crew, "router-1")
        await look(crew, now)
        now += LAST_PAUSE_S
        await look(crew, now)
        assert len(crew.routers()) == 2


async def test_the_last_router_that_dies_while_another_one_waits_for_its_start_brings_both_back(crew: Crew) -> None:
    await let_router_1_wait(crew)
    await die(crew, "router")
    await look(crew, 0.0)
    assert len(crew.routers()) == 2


async def test_the_last_router_that_dies_hurries_routers_alone(crew: Crew) -> None:
    await let_a_store_wait(crew)
    await let_router_1_wait(crew)
    await die(crew, "router")
    await look(crew, 0.0)
    assert [member.name for member in crew.running()] == ["router", "router-1"]
    assert crew._due_s == {"store-0": LAST_PAUSE_S}


async def test_when_none_is_left_after_too_many_deaths_no_router_waits_any_more(crew: Crew) -> None:
    await let_a_store_wait(crew)
    await let_router_1_wait(crew)
    for _ in range(MOST_DEATHS):
        crew._revivals.died("router-1", 0.0, served=True)
    await die(crew, "router")
    with pytest.raises(Lost, match="router died"):
        await look(crew, 0.0)
    assert crew._due_s == {"store-0": LAST_PAUSE_S}


async def test_routers_that_die_at_once_are_all_brought_back_until_it_happens_too_often(crew: Crew) -> None:
    for _ in range(MOST_DEATHS // 2):
        await die(crew, "router")
        await die(crew, "router-1")
        await look(crew, 0.0)
        assert len(crew.routers()) == 2
    await die(crew, "router")
    await die(crew, "router-1")
    with pytest.raises(Lost, match="router died"):
        await look(crew, 0.0)


async def test_a_router_that_cannot_be_started_again_is_tried_again_later(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = Child.start

    async def none_left(*arguments: Any) -> Child:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    await die(crew, "router-1")
    monkeypatch.setattr(Child, "start", none_left)
    await look(crew, 0.0)
    await look(crew, 0.0)
    assert "router-1 died (cannot be started, Resource temporarily unavailable) and is started again in" in caplog.text
    monkeypatch.setattr(Child, "start", start)
    await look(crew, LAST_PAUSE_S)
    assert len(crew.routers()) == 2


async def test_one_that_waited_and_was_started_by_somebody_else_waits_and_is_told_of_when_it_dies_again(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    await let_router_1_wait(crew)
    await crew.start_again("router-1", PATIENCE_S)
    await die(crew, "router-1")
    caplog.clear()
    await look(crew, 0.0)
    assert "router-1 died (killed by SIGKILL) and is started again in" in caplog.text
    assert [member.name for member in crew.routers()] == ["router"]


async def test_no_router_waits_any_more_that_was_killed_on_purpose(crew: Crew) -> None:
    await let_router_1_wait(crew)
    await crew.kill("router-1")
    await die(crew, "router")
    await look(crew, LAST_PAUSE_S)
    assert [member.name for member in crew.routers()] == ["router"]


async def test_a_router_that_is_killed_on_purpose_while_another_one_is_started_stays_dead(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    await let_router_1_wait(crew)
    await die(crew, "router")
    asked, go_on, start = asyncio.Event(), asyncio.Event(), Child.start

    async def held(*arguments: Any) -> Child:
        asked.set()
        await go_on.wait()
        return await start(*arguments)

    monkeypatch.setattr(Child, "start", held)
    crew.note_dead_routers(0.0)
    reviving = asyncio.create_task(crew.revive("router", 0.0))
    await asked.wait()
    await crew.kill("router-1")
    go_on.set()
    await reviving
    await crew.revive("router-1", 0.0)
    assert [member.name for member in crew.running()] == ["router"]


async def looked(crew: Crew, looks: int) -> RouterWatch:
    """After so many looks, each after a while in which whoever answers can."""
    watching = RouterWatch(crew, KEY)
    for _ in range(looks):
        await watching.look(crew.routers())
        await asyncio.sleep(0.1)
    return watching


async def until_ended(crew: Crew) -> int:
    """The watch looks until one is ended; how often."""
    watching, looks = RouterWatch(crew, KEY), 0
    async with asyncio.timeout(PATIENCE_S):
        while len(crew.running()) == 2:
            await watching.look(crew.routers())
            looks += 1
            await asyncio.sleep(0.1)
    await watching.close()
    return looks


async def test_a_router_that_was_asked_and_does_not_run_is_ended_and_started_again(crew: Crew) -> None:
    before = crew.pid("router-1")
    assert await until_ended(crew) > STILL_LOOKS
    assert [member.name for member in crew.running()] == ["router"]
    await look(crew, 0.0)
    assert crew.pid("router-1") != before
    assert len(crew.running()) == 2


@pytest.mark.slow
async def test_routers_that_stand_still_together_vouch_for_nobody(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    async def once(control: str, key: bytes) -> bool:
        if control in asked:
            await asyncio.Event().wait()
        asked.add(control)
        return True

    monkeypatch.setattr(watch, "answers", once)
    monkeypatch.setattr(watch, "signs_of", lambda pid: ())
    await (await looked(crew, 3 * STILL_LOOKS)).close()
    assert len(crew.running()) == 2


@pytest.mark.slow
async def test_a_busy_router_is_asked_for_longer_before_it_is_ended(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = itertools.count()
    monkeypatch.setattr(watch, "signs_of", lambda pid: (float(next(counter)),))
    watching = await looked(crew, 3 * STILL_LOOKS)
    assert len(crew.running()) == 2
    await watching.close()
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.3)
    assert await until_ended(crew) > MOST_MISSED
    assert [member.name for member in crew.running()] == ["router"]


@pytest.mark.slow
async def test_a_router_that_stops_before_it_is_ready_is_ended_later_than_one_that_was(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = crew.serving_routers()[:1]
    monkeypatch.setattr(crew, "serving_routers", lambda: ready)
    watching = await looked(crew, STILL_LOOKS + 2)
    assert len(crew.running()) == 2
    await watching.close()
    assert await until_ended(crew) > STARTING_LOOKS
    assert [member.name for member in crew.running()] == ["router"]


async def test_a_process_that_is_stopped_shows_no_sign_and_one_that_runs_does() -> None:
    code = "import time\nwhile True: time.sleep(0.01)"
    ticking = await Child.start("ticking", [sys.executable, "-c", code], {}, asyncio.subprocess.DEVNULL)
    try:
        before = watch.signs_of(ticking.pid)
        await until(lambda: watch.signs_of(ticking.pid) != before)
        process = psutil.Process(ticking.pid)
        process.suspend()
        await until(lambda: process.status() == psutil.STATUS_STOPPED)
        stopped = watch.signs_of(ticking.pid)
        await asyncio.sleep(0.2)
        assert watch.signs_of(ticking.pid) == stopped
    finally:
        await ticking.kill()


@pytest.mark.slow
async def test_a_router_is_not_ended_while_no_other_one_answers(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(control: str, key: bytes) -> bool:
        return False

    monkeypatch.setattr(watch, "answers", silent)
    await (await looked(crew, 3 * STILL_LOOKS)).close()
    assert len(crew.running()) == 2
