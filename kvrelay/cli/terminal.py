"""What every command needs of a terminal: output, errors in words, an orderly end on Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import typer
from rich.console import Console

from kvrelay.errors import KvrelayError

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn a ``KvrelayError`` into its message and exit status 1."""
    try:
        yield
    except KvrelayError as error:
        errors.print("error: ", style="bold red", end="")
        errors.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` until it ends or a person or a supervisor stops it; its cleanup always runs to its end."""
    with reported():
        asyncio.run(_until_stopped(work))


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:  # a second Ctrl-C must not interrupt the cleanup that the first one started
            stopped = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
