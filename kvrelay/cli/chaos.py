"""``kvrelay chaos``: breaks a running cluster at random while clients ask it, and says whether anything went wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from kvrelay.cli.terminal import INTERRUPTED, console, errors, reported, run
from kvrelay.deploy.chaos.mending import Unmended
from kvrelay.deploy.key import read_key
from kvrelay.errors import Misconfigured
from kvrelay.protocol.engine import engine_key

if TYPE_CHECKING:
    import aiohttp

    from kvrelay.deploy.chaos.run import ChaosPlan, Outcome
    from kvrelay.deploy.chaos.script import Event
    from kvrelay.deploy.chaos.victims import Victims


MockPort = Annotated[
    int | None,
    typer.Option(help="Of mock workers: where they take faults, as kvrelay up --mock says.", show_default=False),
]
KeyOfCluster = Annotated[
    Path | None,
    typer.Option(help="File with the cluster's shared key, for --port and --arena.", show_default=False),
]
Stop = Annotated[
    bool, typer.Option("--stop", help="SIGSTOP workers, stores and routers of this machine, and SIGCONT them.")
]
Kill = Annotated[bool, typer.Option("--kill", help="kill -9 them too: a supervisor has to start them again.")]
Network = Annotated[
    bool,
    typer.Option(
        "--network",
        help="Cut members off, wholly or for moments: those in network namespaces of their own. For root. With --kill "
        "they may die meanwhile, which leaves half-open sockets.",
    ),
]
Clock = Annotated[bool, typer.Option("--clock", help="Set this machine's clock back by hours, and forth. For root.")]
Fill = Annotated[
    Path | None,
    typer.Option(
        help="Fill the file system of this folder, a small one: where logs and router.learned_file are.",
        show_default=False,
    ),
]
Arenas = Annotated[
    list[Path] | None,
    typer.Option(help="Take all slots of the store at this socket; repeatable.", show_default=False),
]


def chaos(
    url: Annotated[str, typer.Option(help="Where the router is.")] = "http://127.0.0.1:8000",
    port: MockPort = None,
    key_file: KeyOfCluster = None,
    stop: Stop = False,
    kill: Kill = False,
    network: Network = False,
    clock: Clock = False,
    fill: Fill = None,
    arena: Arenas = None,
    events: Annotated[int, typer.Option(min=1, help="How often something is done.")] = 100,
    streams: Annotated[int, typer.Option(min=1, help="Clients that ask at the same time.")] = 16,
    every_s: Annotated[float, typer.Option(min=0.01, help="Mean time between two events.")] = 0.5,
    seed: Annotated[int | None, typer.Option(help="To repeat a run; chosen and shown when left out.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="KVRELAY_API_KEY", help="Bearer token, when the router wants one.", show_default=False)
    ] = "",
) -> None:
    """Kill, stop, cut off and cancel at random while clients ask for streams, on a cluster that nobody needs.

    It wants a cluster without promises (slo_ttft_s, slo_tpot_s), which would turn requests away. Every prompt is asked
    once before anything is broken; after that each answer has to be the same, or end with an
    error that says so: what it said is counted. Clients go away or stop reading in any case. At the end everything is
    mended, and nothing may be held anywhere. Ends with status 1 when an answer was wrong or hung or, with all routers
    left alone, was cut off without an error, or when something is held.

    However it ends, Ctrl-C and SIGTERM included, it tries to mend each thing that it broke, and waits 20 s for one at
    most. What cannot be mended is named, with what mends it by hand, and the status is 1.

    Example:  kvrelay chaos --port 7090 --key-file key --events 200
    """
    from kvrelay.deploy.chaos.run import ChaosPlan

    ways = _Ways(port, stop, kill, network, clock, fill, tuple(arena or ()))
    with reported():
        key = _key(ways, key_file)
    plan = ChaosPlan(
        events=events, streams=streams, every_s=every_s, seed=random.randrange(1 << 31) if seed is None else seed
    )
    console.print(f"seed {plan.seed}: {events} events, {streams} streams")
    witness = _Witness()
    stopped = run(_wreak(url, api_key, key, ways, plan, witness), _announce_mending)
    if witness.outcome is not None:
        _show(witness.outcome)
    if witness.broken or (witness.outcome is not None and not witness.outcome.is_good):
        raise typer.Exit(1)
    if stopped:
        raise typer.Exit(INTERRUPTED)


class _Ways(NamedTuple):
    """What may be broken."""

    port: int | None
    stop: bool
    kill: bool
    network: bool
    clock: bool
    fill: Path | None
    arenas: tuple[Path, ...]


def _key(ways: _Ways, file: Path | None) -> bytes:
    """The cluster's key, where it is needed. Raises ``Misconfigured``."""
    if not any(ways):
        raise Misconfigured(
            "say what may be broken: mock workers (--port), processes here (--stop, --kill), networks (--network), "
            "the clock (--clock), a file system (--fill) or a store's memory (--arena)"
        )
    if (ways.port or ways.arenas) and file is None:
        raise Misconfigured("--port and --arena need --key-file: faults are taken from those who hold the key")
    return read_key(file) if file is not None else b""


async def _wreak(url: str, api_key: str, key: bytes, ways: _Ways, plan: ChaosPlan, witness: _Witness) -> None:
    import aiohttp

    from kvrelay.deploy.chaos.run import wreak
    from kvrelay.deploy.chaos.victims import Together

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        victims = Together(list(_victims(http, key, ways)))
        witness.outcome = await wreak(http, url.rstrip("/"), victims, plan, witness.hear)


def _victims(http: aiohttp.ClientSession, key: bytes, ways: _Ways) -> Iterator[Victims]:
    """Raises ``Misconfigured`` for what cannot be broken here."""
    from kvrelay.deploy.chaos.arena import ArenaVictims
    from kvrelay.deploy.chaos.clock import ClockVictims
    from kvrelay.deploy.chaos.disk import DiskVictims
    from kvrelay.deploy.chaos.network import NetworkVictims
    from kvrelay.deploy.chaos.processes import ProcessVictims
    from kvrelay.deploy.chaos.script import Deed
    from kvrelay.deploy.chaos.victims import MockVictims

    if ways.port:
        yield MockVictims(http, f"http://127.0.0.1:{ways.port}", engine_key(key))
    if deeds := [deed for deed, wanted in ((Deed.STOP, ways.stop), (Deed.KILL, ways.kill)) if wanted]:
        yield ProcessVictims(deeds)
    if ways.network:
        yield NetworkVictims(kills=ways.kill)
    if ways.clock:
        yield ClockVictims()
    if ways.fill is not None:
        yield DiskVictims(ways.fill)
    if ways.arenas:
        yield ArenaVictims(ways.arenas, key)


class _Witness:
    """Says what happens, and remembers how it ended."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.broken: list[Unmended] = []

    def hear(self, told: Event | Unmended) -> None:
        if isinstance(told, Unmended):
            self.broken.append(told)
            errors.print(str(told), style="bold red", markup=False, soft_wrap=True)
        else:
            who = f"{told.target} for {told.lasts_s:.1f} s" if told.target else "a client"
            console.print(f"{told.number:5}  {told.deed} {who}", markup=False)


def _announce_mending() -> None:
    console.print("Stopping: what is broken is mended first ...")


def _show(outcome: Outcome) -> None:
    for name, value in msgspec.to_builtins(outcome).items():
        told = ", ".join(f"{each} {count}" for each, count in value.items()) if isinstance(value, dict) else value
        console.print(f"{name:<16} {told or 'none'}", markup=False, soft_wrap=True)
