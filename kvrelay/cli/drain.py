"""``kvrelay drain``: a worker gets no new work, and the command ends when what it had is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from kvrelay.cli.draining import Routers, Said
from kvrelay.cli.settings import KeyFile, check_addresses
from kvrelay.cli.terminal import INTERRUPTED, console, errors, reported, run
from kvrelay.deploy.key import read_key
from kvrelay.errors import Lost, Refused

DEFAULT_ROUTER = "127.0.0.1:7080"
ASK_EVERY_S = 0.2
HAND_OVER_S = 3.0
"""Longest wait for streams to go on elsewhere; from their pages it takes some milliseconds."""


def drain(
    worker: Annotated[str, typer.Argument(help="Its name; /health lists all.")],
    key_file: KeyFile,
    router: Annotated[
        list[str] | None,
        typer.Option(help=f"HOST:PORT of a router's control port; name all routers. Default {DEFAULT_ROUTER}."),
    ] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option(help="After so many seconds streams go on at other workers.", min=0, show_default=False),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also the last worker that can be given answers to write.")
    ] = False,
) -> None:
    """Give a worker no new work and wait until it has none: then it can be stopped, and nobody misses it.

    Requests that run there are finished, and a prefill worker stays until the pages that it computed are where they are
    needed. With --deadline-s, streams that run longer go on at other workers, from their pages: their clients notice a
    short pause at most. Ends with status 0 when the worker is empty, with 1 when something is left that cannot move, or
    when the cluster has more routers than were named; it is draining all the same. It gets work again once it is
    started anew, or with --undo.

    The last worker that can be given answers to write is not drained without --force: one whose circuit breaker is not
    closed, that is draining, silent or not healthy does not count as another.

    Example:  kvrelay drain decode-0 --key-file key --router 10.0.0.1:7080
    """
    with reported():
        routers, key = check_addresses("--router", router) or (DEFAULT_ROUTER,), read_key(key_file)
    fleet = Routers(routers, key)
    if run(_undo(fleet, worker) if undo else _drain(fleet, worker, deadline_s, force)):
        raise typer.Exit(INTERRUPTED)


async def _undo(routers: Routers, worker: str) -> None:
    async with routers:
        await routers.drain(worker, undo=True)
    console.print(f"{worker} gets work again.", markup=False)


async def _drain(routers: Routers, worker: str, deadline_s: float | None, force: bool) -> None:
    """Raises ``Lost`` when something is left, or may be at a router that was not asked."""
    async with routers:
        said = await routers.drain(worker, force=force)
        if said.unasked:
            errors.print(f"warning: {said.unasked}", style="yellow", markup=False, soft_wrap=True)
        said = await _until_empty(said, lambda: routers.remaining(worker), deadline_s)
        if not said.is_empty:
            console.print("The deadline is over: streams go on elsewhere.")
            said = await _until_empty(said, lambda: routers.hand_over(worker), HAND_OVER_S)
        if not said.is_empty:
            raise Lost(f"{said} that cannot move; it is draining all the same")
    if said.unasked:
        raise Lost(
            f"{worker} has nothing left at the routers that were asked, but it cannot be stopped: {said.unasked}"
        )
    console.print(f"{worker} is empty: it can be stopped.", markup=False)


async def _until_empty(said: Said, ask: Callable[[], Awaitable[Said]], within_s: float | None) -> Said:
    """Ask again and again, and show what is left; the last answer."""
    shown = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not said.is_empty:
                if str(said) != shown:
                    shown = str(said)
                    console.print(shown, markup=False, soft_wrap=True)
                await asyncio.sleep(ASK_EVERY_S)
                said = await ask()
                if not said.is_draining:
                    raise Refused(f"{said.worker} gets work again: it was started anew, or somebody undid this")
    return said
