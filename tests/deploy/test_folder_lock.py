"""Tests of deploy/folder_lock.py, and of clusters that want the same run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrelay.config import Config, RouterConfig
from kvrelay.deploy.folder_lock import FolderLock
from kvrelay.deploy.local import LocalCluster
from kvrelay.errors import Misconfigured
from tests.deploy.owner import ENOUGH, Owner, start

HOLDER = """
import pathlib, sys, time
from kvrelay.deploy.folder_lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def holder_of(path: Path) -> Owner:
    owner = Owner(HOLDER, path)
    assert owner.said == "held"
    return owner


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


async def test_a_second_cluster_in_a_run_directory_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "t" / "worker-1").mkdir(parents=True)
    for name in ("key", "config.toml", "t/worker-1/engine.json"):
        (tmp_path / name).write_text("of the first")
    first = holder_of(tmp_path / "cluster.lock")
    try:
        before = contents(tmp_path)
        with pytest.raises(Misconfigured) as caught:
            await start(tmp_path, tmp_path)
        assert str(caught.value) == (
            f"{tmp_path} is in use by process {first.pid}; stop it, or set KVRELAY_RUN_DIR to another folder"
        )
        assert contents(tmp_path) == before
    finally:
        first.kill()


async def test_a_run_directory_is_free_again_after_its_cluster_ended_or_was_killed(tmp_path: Path) -> None:
    holder_of(tmp_path / "cluster.lock").kill()
    for _ in range(2):
        with pytest.raises(Misconfigured, match=ENOUGH):
            await start(tmp_path, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_lock_is_had_once_even_in_one_process(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "lock")
    with pytest.raises(Misconfigured, match=f"process {os.getpid()};"):
        FolderLock(tmp_path / "lock")
    lock.release()
    FolderLock(tmp_path / "lock").release()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path / "lock")
    assert (tmp_path / "precious").read_text() == "kept"


async def test_the_run_directory_is_told_with_the_key_in_it_before_any_process_starts(tmp_path: Path) -> None:
    told: list[Path] = []
    key = tmp_path / "r" / "key"

    def enough(path: Path) -> None:
        told.append(path)
        assert key.exists()
        raise Misconfigured("enough")

    config = Config(router=RouterConfig(port=0, control_port=0))
    cluster = LocalCluster(config, run_dir=tmp_path / "r", model=tmp_path, on_run_dir=enough)
    with pytest.raises(Misconfigured, match="enough"):
        async with cluster:
            pytest.fail("it served")
    assert told == [tmp_path / "r"]
    assert cluster.names == []
    assert not key.exists()
