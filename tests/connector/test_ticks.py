"""Every process of an engine counts for itself, and their supervisor sees the sum."""

from __future__ import annotations

import os
from pathlib import Path

from kvrelay.connector.ticks import SCHEDULER, Ticks, read_ticks, ticks_path


def test_nobody_counts_before_there_is_an_engine(tmp_path: Path) -> None:
    assert read_ticks(ticks_path(tmp_path / "engine.json")) is None


def test_the_counts_of_all_processes_add_up(tmp_path: Path) -> None:
    path = ticks_path(tmp_path / "engine.json")
    scheduler, rank = Ticks(path, SCHEDULER), Ticks(path, 1)
    assert read_ticks(path) == 0
    scheduler.tick()
    pid = os.fork()
    if not pid:
        for _ in range(30):
            rank.tick()
        os._exit(0)
    os.waitpid(pid, 0)
    assert read_ticks(path) == 31
    Ticks(path, 2)
    assert read_ticks(path) == 31, "who comes later wipes nothing out"


def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "x.ticks"
    path.write_bytes(b"\x01" + bytes(7) + b"\x05")
    assert read_ticks(path) == 1
    path.write_bytes(b"")
    assert read_ticks(path) is None
