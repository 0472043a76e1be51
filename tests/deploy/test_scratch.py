"""Tests of deploy/scratch.py, with owners that are killed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvrelay.deploy.scratch import Scratch, scratch
from kvrelay.errors import Misconfigured
from tests.deploy.owner import ENOUGH, Owner, start

OWNER = """
import sys, time
from kvrelay.deploy.scratch import Scratch
folder = Scratch("own-", sys.argv[1])
(folder.path / "full").mkdir()
print(folder.path, flush=True)
time.sleep(600)
"""


def owner_below(parent: Path) -> tuple[Owner, Path]:
    owner = Owner(OWNER, parent)
    return owner, Path(owner.said)


def test_the_next_start_removes_the_folder_of_a_killed_owner_and_none_of_a_living_one(tmp_path: Path) -> None:
    dead, left = owner_below(tmp_path)
    living, held = owner_below(tmp_path)
    assert left.exists(), "its owner lives"
    dead.kill()
    with scratch("own-", str(tmp_path)):
        assert not left.exists()
        assert (held / "full").exists()
    living.kill()


async def test_a_cluster_removes_its_own_folder_and_that_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, left = owner_below(tmp_path)
    dead.kill()
    left.rename(tmp_path / "kvrelay-left")
    with pytest.raises(Misconfigured, match=ENOUGH):
        await start(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_surely_a_dead_owners_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "own-foreign"
    foreign.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "owner.lock").touch()
    (tmp_path / "own-link").symlink_to(target)
    (tmp_path / "own-file").touch()
    (tmp_path / "other-1").mkdir()
    (tmp_path / "other-1" / "owner.lock").touch()
    before = sorted(tmp_path.rglob("*"))
    with scratch("own-", str(tmp_path)) as mine:
        assert mine.stat().st_mode & 0o777 == 0o700
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_kept_stays(tmp_path: Path) -> None:
    kept = Scratch("own-", str(tmp_path))
    kept.keep()
    with scratch("own-", str(tmp_path)):
        assert kept.path.exists()
