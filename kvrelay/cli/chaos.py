"""``kvrelay chaos``: breaks a running cluster at random while clients ask it, and says whether anything went wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvrelay.cli.terminal import INTERRUPTED, console, reported, run
from kvrelay.deploy.key import read_key
from kvrelay.errors import Misconfigured
from kvrelay.protocol.engine import engine_key

if TYPE_CHECKING:
    from kvrelay.deploy.chaos.run import ChaosPlan, Outcome
    from kvrelay.deploy.chaos.script import Event
    from kvrelay.deploy.chaos.victims import Victims


def chaos(
    url: Annotated[str, typer.Option(help="Where the router is.")] = "http://127.0.0.1:8000",
    port: Annotated[
        int | None,
        typer.Option(help="Of mock workers: where they take faults, as kvrelay up --mock says.", show_default=False),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's shared key, for --port.", show_default=False)
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="SIGSTOP workers, stores and routers of this machine, and SIGCONT them.")
    ] = False,
    kill: Annotated[
        bool, typer.Option("--kill", help="kill -9 them too: a supervisor has to start them again.")
    ] = False,
    events: Annotated[int, typer.Option(min=1, help="How often something is done.")] = 100,
    streams: Annotated[int, typer.Option(min=1, help="Clients that ask at the same time.")] = 16,
    every_s: Annotated[float, typer.Option(min=0.01, help="Mean time between two events.")] = 0.5,
    seed: Annotated[int | None, typer.Option(help="To repeat a run; chosen and shown when left out.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="KVRELAY_API_KEY", help="Bearer token, when the router wants one.", show_default=False)
    ] = "",
) -> None:
    """Kill, stop and cancel at random while clients ask for streams, on a cluster that nobody needs.

    Every prompt is asked once before anything is broken; after that each answer has to be the same, or end with an
    error that says so. At the end everything is mended, and nothing may be held anywhere. Ends with status 1 when an
    answer was wrong or hung, or something is held.

    Example:  kvrelay chaos --port 7090 --key-file key --events 200
    """
    from kvrelay.deploy.chaos.run import ChaosPlan

    with reported():
        if not (port or stop or kill):
            raise Misconfigured("say what may be broken: mock workers (--port), processes here (--stop, --kill)")
        if port and key_file is None:
            raise Misconfigured("--port needs --key-file: mock workers take faults from those who hold the key")
        key = engine_key(read_key(key_file)) if key_file is not None else ""
    plan = ChaosPlan(
        events=events, streams=streams, every_s=every_s, seed=random.randrange(1 << 31) if seed is None else seed
    )
    console.print(f"seed {plan.seed}: {events} events, {streams} streams")
    said: list[Outcome] = []
    if run(_wreak(url, api_key, (port, key), (stop, kill), plan, said)):
        raise typer.Exit(INTERRUPTED)
    _show(said[0])
    if not said[0].is_good:
        raise typer.Exit(1)


async def _wreak(
    url: str, api_key: str, mocks: tuple[int | None, str], ways: tuple[bool, bool], plan: ChaosPlan, said: list[Outcome]
) -> None:
    import aiohttp

    from kvrelay.deploy.chaos.run import wreak

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        said.append(await wreak(http, url.rstrip("/"), _victims(http, mocks, ways), plan, _tell))


def _victims(http: object, mocks: tuple[int | None, str], ways: tuple[bool, bool]) -> Victims:
    import aiohttp

    from kvrelay.deploy.chaos.script import Deed
    from kvrelay.deploy.chaos.victims import MockVictims, ProcessVictims

    (port, key), (stop, kill) = mocks, ways
    if port:
        assert isinstance(http, aiohttp.ClientSession)
        return MockVictims(http, f"http://127.0.0.1:{port}", key)
    return ProcessVictims([deed for deed, wanted in ((Deed.STOP, stop), (Deed.KILL, kill)) if wanted])


def _tell(event: Event) -> None:
    who = f"{event.target} for {event.lasts_s:.1f} s" if event.target else "a client"
    console.print(f"{event.number:5}  {event.deed} {who}", markup=False)


def _show(outcome: Outcome) -> None:
    for name, value in msgspec.to_builtins(outcome).items():
        told = ", ".join(f"{each} {count}" for each, count in value.items()) if isinstance(value, dict) else value
        console.print(f"{name:<16} {told or 'none'}", markup=False, soft_wrap=True)
