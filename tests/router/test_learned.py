"""What a router learned outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from kvrelay.config import Config, RouterConfig
from kvrelay.errors import Misconfigured
from kvrelay.fleet.experience import Experience, Learned
from kvrelay.fleet.links import Links
from kvrelay.policy.moves import link
from kvrelay.router import learned
from kvrelay.router.learned import LearnedFile
from kvrelay.router.runner import Router
from tests.fleet.values import worker
from tests.patience import PATIENCE_S, until
from tests.router.cluster import KEY, Cluster, _loaded


async def test_a_new_router_knows_what_the_last_one_learned(model_folder: Path, tmp_path: Path) -> None:
    config = RouterConfig(port=0, control_port=0, learned_file=str(tmp_path / "learned.json"))
    async with Cluster(model_folder, router_config=config) as cluster:
        await cluster.split()
        await cluster.stream()
        experience = cluster.router.brain.experience
        await until(lambda: experience.perf("p1").prefill.seen == 1)
        first = experience.perf("p1")
    again = Router(Config(router=config), KEY, _loaded(model_folder)).brain.experience
    again.join(worker("p1"))
    assert again.perf("p1").prefill_s(100) == pytest.approx(first.prefill_s(100), rel=0.01)


async def test_how_far_each_law_is_off_is_told_by_worker(model_folder: Path) -> None:
    async with Cluster(model_folder) as cluster:
        await cluster.split()
        assert await cluster.metric('kvrelay_law_error_ratio{law="prefill",worker="p1"}') == 1.0
        await cluster.stream()
        experience = cluster.router.brain.experience
        await until(lambda: experience.prefill("p1").seen == 1)
        error = experience.prefill("p1").error()
        assert 0.0 < error != 1.0
        assert await cluster.metric('kvrelay_law_error_ratio{law="prefill",worker="p1"}') == pytest.approx(error)
        assert len(list(experience.errors())) == 2 * 3, "each of two workers has three laws"


def test_a_file_of_something_else_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(Misconfigured, match=r"notes\.txt is no file of learned timings"):
        LearnedFile(path, Experience(Links())).load()
    assert path.read_text() == "my notes"


def learned_file(path: Path) -> LearnedFile:
    """One of a router that has seen a few prefills, answers and moves."""
    experience = Experience(Links())
    experience.join(worker("p1"))
    for tokens in (10, 200, 3000):
        experience.saw("p1", lambda perf, tokens=tokens: perf.saw_prefill(tokens, 7, 0.01 + tokens / 1000))  # type: ignore[misc]
    experience.saw("p1", lambda perf: perf.saw_step(3, 500, 0.02).saw_answer(0.01))
    experience._links.learn("s1", "s2", link().saw_moving(1 << 24, 0.1))
    experience.saw_output("tiny", 30.0)
    asyncio.run(LearnedFile(path, experience).save())
    return LearnedFile(path, Experience(Links()))


def test_what_was_learned_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = learned_file(tmp_path / "learned.json")
    kept.load()
    assert len(kept._experience.learned().kinds) == len(kept._experience.learned().ways) == 1
    assert not caplog.records


def changed(value: object, number: float) -> object:
    """``value`` as JSON with every fraction in it another number."""
    if isinstance(value, dict):
        return {key: changed(each, number) for key, each in value.items()}
    if isinstance(value, list):
        return [changed(each, number) for each in value]
    return value if isinstance(value, int) else number


@pytest.mark.parametrize("number", [-1.0, 0.0, 1e308])
@pytest.mark.parametrize("part", ["kinds", "ways", "output_tokens"])
def test_values_that_nobody_can_have_learned_are_ignored_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: float, part: str
) -> None:
    kept = learned_file(tmp_path / "learned.json")
    known = msgspec.json.decode(kept._path.read_bytes())
    known[part] = changed(known[part], number)
    kept._path.write_bytes(msgspec.json.encode(known))
    kept.load()
    if (part, number) == ("output_tokens", 0.0):
        assert kept._experience.learned().output_tokens == {"tiny": 0.0}
    else:
        assert kept._experience.learned() == Learned()
        (record,) = caplog.records
        assert f"router.learned_file {kept._path} is ignored" in record.message


async def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = LearnedFile(tmp_path / "missing" / "learned.json", Experience(Links()))
    kept.load()
    await kept.save()
    await kept.save()
    assert len(caplog.records) == 1


async def test_a_write_that_fails_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.mkdir()
    await LearnedFile(path, Experience(Links())).save()
    assert list(tmp_path.iterdir()) == [path]


class StalledFolder:
    """A folder whose files cannot be written before somebody reads them: what is written goes into a pipe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "learned.json"
        self.partial = folder / f"learned.json.{os.getpid()}.tmp"
        os.mkfifo(self.partial)

    def go_on(self) -> bytes:
        """Let the write end; what was written."""
        return self.partial.read_bytes()

    def writers(self) -> int:
        """Threads that stand in a write."""
        return sum(thread.name == learned.WRITER for thread in threading.enumerate())


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[StalledFolder]:
    folder = StalledFolder(tmp_path)
    rescue = threading.Timer(PATIENCE_S, folder.go_on)  # of a loop that stands in the write itself
    rescue.start()
    yield folder
    rescue.cancel()


@contextlib.asynccontextmanager
async def kept_in(folder: StalledFolder) -> AsyncIterator[asyncio.Task[None]]:
    """The task that keeps the file; it stands in a write."""
    keeping = asyncio.create_task(LearnedFile(folder.path, Experience(Links())).run())
    await until(folder.writers)
    yield keeping
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_a_folder_that_stalls_stops_no_request_and_has_one_write_to_do(
    stalled: StalledFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "SAVE_S", 0.0)
    async with kept_in(stalled):
        for _ in range(20):
            await asyncio.sleep(0)
        assert stalled.writers() == 1
        monkeypatch.setattr(learned, "SAVE_S", PATIENCE_S)
        assert msgspec.json.decode(await asyncio.to_thread(stalled.go_on), type=Learned) == Learned()
        await until(lambda: not stalled.writers())


async def test_a_write_that_stalls_is_given_up_when_the_router_ends(
    stalled: StalledFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learned, "SAVE_S", 0.0)
    monkeypatch.setattr(learned, "LAST_SAVE_S", 0.01)
    async with kept_in(stalled):
        pass
    assert "is not kept" in caplog.text
    assert stalled.writers() == 1
    assert await asyncio.to_thread(stalled.go_on)


async def test_an_error_that_nobody_expects_of_a_write_ends_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "SAVE_S", 0.0)
    with pytest.raises(ValueError, match="null byte"):
        await LearnedFile(Path("learned\0.json"), Experience(Links())).run()
