"""What a router learned outlives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.config import Config, RouterConfig
from kvrelay.errors import Misconfigured
from kvrelay.fleet.experience import Experience
from kvrelay.fleet.links import Links
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


def test_a_file_of_something_else_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(Misconfigured, match=r"notes\.txt is no file of learned timings"):
        LearnedFile(path, Experience(Links())).load()
    assert path.read_text() == "my notes"


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = LearnedFile(tmp_path / "missing" / "learned.json", Experience(Links()))
    kept.load()
    kept.save()
    kept.save()
    assert len(caplog.records) == 1
