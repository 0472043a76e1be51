"""What a router learned outlives it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvrelay.config import Config, RouterConfig
from kvrelay.errors import Misconfigured
from kvrelay.fleet.experience import Experience, Learned
from kvrelay.fleet.links import Links
from kvrelay.policy.moves import link
from kvrelay.router.learned import LearnedFile
from kvrelay.router.runner import Router
from tests.fleet.values import worker
from tests.patience import until
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
    LearnedFile(path, experience).save()
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


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = LearnedFile(tmp_path / "missing" / "learned.json", Experience(Links()))
    kept.load()
    kept.save()
    kept.save()
    assert len(caplog.records) == 1
