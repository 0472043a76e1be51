"""What every command needs of a terminal: output, errors in words, an orderly end on Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import typer
from rich.console import Console, RenderableType

from kvrelay.errors import KvrelayError

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended before it was done."""

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


def show(what: RenderableType) -> None:
    """Print ``what``; into a pipe or a file without the blanks that pad tables and wrapped lines."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    lines = captured.get().splitlines()
    console.file.write("".join(f"{line.rstrip()}\n" for line in lines))


def announce_stop() -> None:
    """Say at once that Ctrl-C was heard: the cleanup may take seconds."""
    console.print("Stopping ... (Ctrl-C again kills at once)")


def run(
    work: Coroutine[Any, Any, None],
    on_stop: Callable[[], None] = lambda: None,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> bool:
    """Run ``work`` until it ends, or a person or a supervisor stops it: True then. Its cleanup always runs to its end.

    ``on_stop`` is called the moment that the stop is heard. A second one cancels what is left of the cleanup.
    ``loop`` makes another event loop than asyncio's own.
    """
    with reported(), asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(_until_stopped(work, on_stop))


async def _until_stopped(work: Coroutine[Any, Any, None], on_stop: Callable[[], None]) -> bool:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    stops = 0

    def stop() -> None:
        nonlocal stops
        stops += 1
        if stops == 1:
            on_stop()
        if stops <= 2:  # the first begins the cleanup, the second cuts its waits short, further ones change nothing
            task.cancel()

    # Whoever starts this under nohup wants it to outlive the terminal.
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stops:
            raise
    return stops > 0
