"""Members that die under ``kvrelay up``: started again, and left alone once that is of no use."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kvrelay.deploy.comebacks import FIRST_PAUSE_S, MOST_DEATHS, WELL_S, Comebacks
from kvrelay.deploy.crew import Crew
from kvrelay.deploy.members import Kind, Member, RunDir
from kvrelay.deploy.process import Child
from kvrelay.errors import Lost
from kvrelay.types import Role
from tests.patience import PATIENCE_S, until


def test_the_first_start_comes_at_once_and_the_pause_doubles_until_it_stays_down() -> None:
    comebacks = Comebacks()
    pauses = [comebacks.died("a", served_s=0.0) for _ in range(MOST_DEATHS)]
    assert pauses == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, None]
    assert (comebacks.is_down("a"), comebacks.is_down("b")) == (True, False)


def test_one_that_was_well_in_between_comes_back_for_ever() -> None:
    comebacks = Comebacks()
    assert [comebacks.died("a", served_s=WELL_S) for _ in range(3 * MOST_DEATHS)] == [0.0] * 3 * MOST_DEATHS


def test_somebody_who_starts_it_clears_its_record() -> None:
    comebacks = Comebacks()
    for _ in range(MOST_DEATHS):
        comebacks.died("a", served_s=1.0)
    comebacks.wanted("a")
    assert not comebacks.is_down("a")
    assert comebacks.died("a", served_s=1.0) == 0.0


# ---------------------------------------------------------------- with processes

READY = "import time; print('kvrelay ready: as if', flush=True); time.sleep(600)"
SICK = "print('RuntimeError: no memory'); raise SystemExit(3)"


@pytest.fixture
async def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crew]:
    """A router, a store and two workers that only say that they are ready."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    made = Crew(run, lambda name, progress: None)
    monkeypatch.setattr(Member, "command", property(lambda self: [sys.executable, "-c", *self.arguments]))
    kinds = {"router": Kind.ROUTER, "store-0": Kind.STORE, "both-0": Kind.WORKER, "both-1": Kind.WORKER}
    for name, kind in kinds.items():
        role = Role.BOTH if kind is Kind.WORKER else None
        await made.start(Member(name=name, kind=kind, arguments=(READY,), role=role))
    try:
        await made.until_ready(kinds, PATIENCE_S)
        made.note_dead_members(0.0)
        yield made
    finally:
        await made.stop()


async def die(crew: Crew, name: str) -> None:
    psutil.Process(crew.pid(name)).send_signal(signal.SIGKILL)
    await ended(crew, name)


async def ended(crew: Crew, name: str) -> None:
    await until(lambda: all(member.name != name for member in crew.running()))


async def look(crew: Crew, now: float) -> None:
    crew.note_dead_members(now)
    crew.raise_if_crashed()
    await asyncio.gather(*(crew.revive(name, now) for name in crew.members))


async def test_one_that_waits_is_started_after_its_pause_and_not_before(crew: Crew) -> None:
    await die(crew, "both-0")
    await look(crew, 10.0)
    await die(crew, "both-0")
    for now, count in ((10.0, 3), (10.0 + 0.9 * FIRST_PAUSE_S, 3), (10.0 + FIRST_PAUSE_S, 4)):
        await look(crew, now)
        assert len(crew.running()) == count
    assert not crew._due_s


async def test_one_that_waits_and_is_started_by_somebody_waits_no_longer_and_has_a_clear_record(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        await die(crew, "both-0")
        await look(crew, 10.0)
    assert "both-0" in crew._due_s
    await crew.start_again("both-0", PATIENCE_S)
    assert not crew._due_s
    await die(crew, "both-0")
    caplog.clear()
    await look(crew, 20.0)
    assert "both-0 died (killed by SIGKILL) and is started again now" in caplog.text


@pytest.mark.parametrize("name", ["both-0", "store-0", "router"])
async def test_a_worker_a_store_or_an_only_router_that_dies_is_started_again_with_the_same_command(
    crew: Crew, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = crew.pid(name)
    await die(crew, name)
    await look(crew, 1.0)
    assert crew.pid(name) != before
    assert len(crew.running()) == 4
    assert f"{name} died (killed by SIGKILL) and is started again now" in caplog.text


async def test_one_that_serves_again_is_told_with_the_time_that_it_was_away(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    await die(crew, "both-0")
    await look(crew, 10.0)
    assert "serves again" not in caplog.text
    await until(lambda: all(each.read().ready for each in crew._followers.values()))
    crew.note_dead_members(52.0)
    crew.note_dead_members(53.0)
    assert caplog.messages[1:] == ["both-0 serves again, after 42 s"]


async def test_one_that_ends_as_it_was_asked_to_was_stopped_and_did_not_die(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    crew.members["both-0"] = msgspec.structs.replace(crew.members["both-0"], arguments=("print('bye')",))
    await die(crew, "both-0")
    await look(crew, 10.0)
    await ended(crew, "both-0")
    await look(crew, 100.0)
    assert caplog.messages[1] == f"both-0 was stopped and is started again in 0.5 s; its log: {crew._run.log('both-0')}"


async def sicken(crew: Crew, name: str) -> None:
    """It dies, and every new process of it at once."""
    crew.members[name] = msgspec.structs.replace(crew.members[name], arguments=(SICK,))
    await die(crew, name)
    now = 100.0
    async with asyncio.timeout(PATIENCE_S):
        while not crew._comebacks.is_down(name):
            await look(crew, now)
            await asyncio.sleep(0.02)
            now += 50.0


async def test_one_that_dies_at_once_again_and_again_stays_down_and_the_others_go_on(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    await sicken(crew, "both-0")
    assert [member.name for member in crew.running()] == ["router", "store-0", "both-1"]
    assert (
        "both-0 died 5 times in a row and did not serve for 30 s in between: it stays down, and the rest" in caplog.text
    )
    assert "RuntimeError: no memory" in caplog.text
    await die(crew, "both-1")
    await look(crew, 2e6)
    assert [member.name for member in crew.running()] == ["router", "store-0", "both-1"]


async def test_the_cluster_ends_when_no_worker_stays_up(crew: Crew) -> None:
    await sicken(crew, "both-0")
    with pytest.raises(Lost, match="no memory"):
        await sicken(crew, "both-1")


async def with_prefill(crew: Crew) -> None:
    """There is a prefill worker besides."""
    await crew.start(Member(name="prefill-0", kind=Kind.WORKER, arguments=(READY,), role=Role.PREFILL))
    await crew.until_ready(["prefill-0"], PATIENCE_S)


@pytest.mark.slow
async def test_the_cluster_ends_when_only_prefill_workers_stay_up(crew: Crew) -> None:
    await with_prefill(crew)
    await sicken(crew, "both-0")
    with pytest.raises(Lost, match="no memory"):
        await sicken(crew, "both-1")


async def test_the_cluster_goes_on_without_a_prefill_worker(crew: Crew) -> None:
    await with_prefill(crew)
    await sicken(crew, "prefill-0")
    assert len(crew.running()) == 4


async def test_the_cluster_ends_when_its_only_router_does_not_stay_up_and_nobody_says_that_the_rest_goes_on(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Lost, match="no memory"):
        await sicken(crew, "router")
    assert "router died 5 times in a row and did not serve for 30 s in between: it is not started again" in caplog.text
    assert "the rest goes on" not in caplog.text


async def test_one_whose_log_cannot_be_opened_is_tried_again_and_comes_back_when_it_can(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    log = crew._run.log("both-0")
    await die(crew, "both-0")
    log.unlink()
    log.mkdir()
    await look(crew, 1.0)
    await look(crew, 1.0)
    assert f"both-0 died (cannot be started, {log}: Is a directory) and is started again in 0.5 s" in caplog.text
    log.rmdir()
    await look(crew, 1.0 + FIRST_PAUSE_S)
    assert len(crew.running()) == 4


async def test_one_that_cannot_be_started_is_given_up_like_one_that_dies_at_once(
    crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    log = crew._run.log("both-0")
    await die(crew, "both-0")
    log.unlink()
    log.mkdir()
    for now in range(0, 200 * MOST_DEATHS, 100):
        await look(crew, float(now))
    assert crew._comebacks.is_down("both-0")
    assert "both-0 died 5 times in a row" in caplog.text
    assert len(crew.running()) == 3


async def test_who_dies_after_the_logs_were_moved_away_comes_back_with_a_new_log(crew: Crew, tmp_path: Path) -> None:
    crew._run.logs.rename(tmp_path / "moved")
    await die(crew, "store-0")
    await look(crew, 1.0)
    assert len(crew.running()) == 4
    assert crew._run.log("store-0").exists()


async def test_one_that_cannot_be_started_the_first_time_is_told_in_words(crew: Crew) -> None:
    crew._run.log("both-2").mkdir()
    with pytest.raises(Lost, match=r"both-2 cannot be started: .*Is a directory"):
        await crew.start(Member(name="both-2", kind=Kind.WORKER, arguments=(READY,)))


async def test_a_death_while_the_cluster_starts_is_a_crash_with_the_reason_of_its_log(crew: Crew) -> None:
    await crew.start(Member(name="both-2", kind=Kind.WORKER, arguments=(SICK,)))
    with pytest.raises(Lost, match="both-2 died: RuntimeError: no memory"):
        await crew.until_ready(["both-2"], PATIENCE_S)


async def test_one_whose_remains_take_long_to_end_holds_up_nobody_else(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, asked, before = Child.kill, asyncio.Event(), {name: crew.pid(name) for name in crew.members}

    async def slow(child: Child) -> None:
        if child.pid == before["both-0"]:
            asked.set()
            await asyncio.Event().wait()
        await kill(child)

    monkeypatch.setattr(Child, "kill", slow)
    keeping = asyncio.create_task(crew.keep_up())
    await die(crew, "both-0")
    await asked.wait()
    for name in ("router", "store-0"):
        psutil.Process(before[name]).send_signal(signal.SIGKILL)
        await until(lambda name=name: crew.pid(name) != before[name])  # type: ignore[misc]
    assert not keeping.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_restart_does_not_fail_for_the_death_of_another_one_that_is_about_to_come_back(crew: Crew) -> None:
    crew._is_kept_up = True
    await die(crew, "both-1")
    await crew.start_again("both-0", PATIENCE_S)
    assert "both-1" in crew._due_s


async def test_who_waits_for_one_that_stays_down_hears_why(crew: Crew) -> None:
    crew._is_kept_up = True
    for _ in range(MOST_DEATHS - 1):
        crew._comebacks.died("both-0", served_s=0.0)
    await crew._kill("both-0")
    await crew.start(msgspec.structs.replace(crew.members["both-0"], arguments=(SICK,)))
    with pytest.raises(Lost, match="both-0 died: RuntimeError: no memory"):
        await crew.until_ready(["both-0"], PATIENCE_S)


async def test_one_that_was_killed_on_purpose_stays_dead(crew: Crew) -> None:
    await crew.kill("both-0")
    await look(crew, 1.0)
    assert len(crew.running()) == 3
