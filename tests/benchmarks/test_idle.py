"""Tests of benchmarks/idle.py: processor time of processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.idle import Cpu


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that does nothing but count."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_time_that_a_process_uses_is_counted(busy: int) -> None:
    meter = Cpu.of(busy)
    while not meter.share():
        pass
    assert meter.share() > 0


def test_a_process_is_no_descendant_of_itself(busy: int) -> None:
    assert Cpu.below(busy).share() == 0
