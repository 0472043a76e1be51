"""``kvrelay drain``: a worker gets no new work, and the command ends when what it had is done."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from kvrelay.cli.draining import Routers, Said
from kvrelay.cli.settings import KeyFile, check_addresses
from kvrelay.cli.terminal import INTERRUPTED, console, reported, run
from kvrelay.deploy.key import read_key
from kvrelay.errors import Lost, Refused

DEFAULT_ROUTER = "127.0.0.1:7080"
ASK_EVERY_S = 0.2


def drain(
    worker: Annotated[str, typer.Argument(help="Its name; /health lists all.")],
    key_file: KeyFile,
    router: Annotated[
        list[str] | None,
        typer.Option(help=f"HOST:PORT of a router's control port; name all routers. Default {DEFAULT_ROUTER}."),
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option(help="Wait no longer than so many seconds.", min=0, show_default=False)
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also the last worker that writes answers.")] = False,
) -> None:
    """Give a worker no new work and wait until it has none: then it can be stopped, and nobody misses it.

    Requests that run there are finished, and a prefill worker stays until the pages that it computed are where they are
    needed. Ends with status 0 when the worker is empty, with 1 when the deadline came first: it is draining all the
    same. It gets work again once it is started anew, or with --undo.

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
    """Raises ``Lost`` at the deadline."""
    last = ""
    async with routers:
        said = await routers.drain(worker, force=force)
        try:
            async with asyncio.timeout(deadline_s):
                while not said.is_empty:
                    last = _show(said, last)
                    await asyncio.sleep(ASK_EVERY_S)
                    said = await routers.remaining(worker)
                    if not said.is_draining:
                        raise Refused(f"{worker} gets work again: it was started anew, or somebody undid this")
        except TimeoutError as error:
            raise Lost(f"{worker} is not empty after {deadline_s:g} s: {said}; it is still draining") from error
    console.print(f"{worker} is empty: it can be stopped.", markup=False)


def _show(said: Said, last: str) -> str:
    """Print what remains when that is news."""
    text = str(said)
    if text != last:
        console.print(text, markup=False, soft_wrap=True)
    return text
