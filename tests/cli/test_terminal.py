"""Tests of cli/terminal.py and cli/startup.py."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time

import pytest
from rich.console import Console
from rich.table import Table

from kvrelay.cli import terminal
from kvrelay.cli.startup import StartupView
from kvrelay.cli.terminal import run, show
from kvrelay.deploy.progress import STARTING
from tests.patience import PATIENCE_S


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_stop_is_told_before_the_cleanup_which_runs_to_its_end() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            interrupt()
            await asyncio.sleep(10 * PATIENCE_S)
        finally:
            await asyncio.sleep(0.05)
            seen.append("cleaned up")

    assert run(work(), lambda: seen.append("told"))
    assert seen == ["told", "cleaned up"]


def test_a_second_stop_cuts_the_cleanup_short() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            interrupt()
            await asyncio.sleep(10 * PATIENCE_S)
        finally:
            interrupt()
            try:
                await asyncio.sleep(10 * PATIENCE_S)
            finally:
                seen.append("killed")

    started = time.monotonic()
    assert run(work(), lambda: seen.append("told"))
    assert seen == ["told", "killed"]
    assert time.monotonic() - started < PATIENCE_S


def test_work_that_ends_by_itself_was_not_stopped() -> None:
    async def work() -> None: ...

    assert not run(work())


def test_a_table_in_a_pipe_has_no_blanks_at_the_end_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=output, width=80))
    table = Table.grid(padding=(0, 2))
    table.add_row("a", "long")
    table.add_row("bcd", "x")
    show(table)
    assert output.getvalue() == "a    long\nbcd  x\n"


def test_a_closed_view_tells_of_no_further_step() -> None:
    output = io.StringIO()
    view = StartupView(Console(file=output))
    view.update("store-0", STARTING)
    view.close()
    view.update("decode-0", STARTING)
    assert "store-0" in output.getvalue()
    assert "decode-0" not in output.getvalue()
