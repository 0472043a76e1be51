"""Disks that are full: what kvrelay writes is lost, told, and written again when there is room."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvrelay.config import RouterConfig
from kvrelay.deploy.chaos.disk import DiskVictims
from kvrelay.deploy.chaos.script import Deed
from kvrelay.deploy.engine import EngineSpec
from kvrelay.deploy.process import Child
from kvrelay.deploy.server import EngineServer, write_to
from kvrelay.errors import Misconfigured
from tests.patience import PATIENCE_S
from tests.router.cluster import Cluster
from tests.router.tiny_tokenizer import make_tokenizer

LINES = 3000
"""More than a pipe holds."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    made = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here (root is needed): {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_disk_is_full_to_the_last_byte_and_empty_again(disk: Path) -> None:
    victims = DiskVictims(disk)
    (target,) = await victims.targets()
    await victims.hurt(target.name, Deed.FULL_DISK)
    with pytest.raises(OSError, match="No space left"):
        (disk / "log").write_bytes(b"x")
    await victims.mend(target.name)
    assert (disk / "log").write_bytes(b"x" * 100_000)
    await victims.end()
    assert [path.name for path in disk.iterdir()] == ["log"]


def test_the_disk_that_the_machine_lives_on_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="mount -t tmpfs"):
        DiskVictims(Path("/"))
    with pytest.raises(Misconfigured, match="is no folder"):
        DiskVictims(tmp_path / "missing")


async def test_a_router_that_cannot_keep_what_it_learned_serves_and_says_so(
    disk: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned = disk / "learned.json"
    victims = DiskVictims(disk)
    await victims.hurt(str(disk), Deed.FULL_DISK)
    config = RouterConfig(port=0, control_port=0, learned_file=str(learned))
    async with Cluster(model_folder, router_config=config) as cluster:
        await cluster.split()
        assert cluster.router._learned is not None
        await cluster.router._learned.save()
        assert await cluster.complete()
        assert "cannot be kept" in caplog.text
        assert "No space left on device" in caplog.text
        await victims.end()
        await cluster.router._learned.save()
        assert learned.stat().st_size > 0


async def test_an_engine_whose_log_cannot_be_written_goes_on_and_the_lines_are_counted() -> None:
    code = f"for line in range({LINES}): print('x' * 100, line)"
    child = await Child.start("engine", [sys.executable, "-c", code], os.environ, asyncio.subprocess.PIPE)
    async with aiohttp.ClientSession() as http:
        spec = EngineSpec(model_path=Path("/"), served_name="m", port=1, cpus=())
        engine = EngineServer(spec, child, http, quote_log=True)
        with open("/dev/full", "wb", buffering=0) as full:
            async with asyncio.timeout(PATIENCE_S):
                await engine.relay_log(write_to(full))
                assert await child.wait() == 0
    assert engine.log_lines_lost == LINES
