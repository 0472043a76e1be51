"""What ``LocalCluster`` says when it cannot write its files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvrelay.config import Config, MockConfig, RouterConfig
from kvrelay.deploy import local
from kvrelay.deploy.local import LocalCluster
from kvrelay.errors import Misconfigured

CONFIG = Config(router=RouterConfig(port=0, control_port=0), mock=MockConfig(enabled=True))


async def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(local, "write_secret", full)
    with pytest.raises(Misconfigured, match=r"/key: No space left on device; .*KVRELAY_RUN_DIR"):
        async with LocalCluster(CONFIG, run_dir=tmp_path / "run"):
            pass


async def test_a_run_directory_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match=r"/file/run: Not a directory; .*KVRELAY_RUN_DIR"):
        async with LocalCluster(CONFIG, run_dir=tmp_path / "file" / "run"):
            pass
