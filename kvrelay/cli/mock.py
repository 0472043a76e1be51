"""``kvrelay mock-worker`` and ``kvrelay fault``: simulated workers, and what is to be wrong with them."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.faulting import Route, Shown
from kvrelay.cli.serve import Routers, announce_ready
from kvrelay.cli.settings import ConfigFile, KeyFile, Model, check_addresses, load
from kvrelay.cli.terminal import console, reported, run
from kvrelay.deploy.key import read_key
from kvrelay.deploy.mock.faults import Faults, parse
from kvrelay.deploy.mock.roster import mock_names, parse_size
from kvrelay.deploy.model import model_path
from kvrelay.errors import Misconfigured
from kvrelay.protocol.engine import engine_key

TimeScale = Annotated[
    float | None, typer.Option(help="What is simulated takes so many times as long. Default 1.", show_default=False)
]
Device = Annotated[
    str, typer.Option(help="Whose speed to pretend: A100, H100, H200, B200, L40S, MI300X, cpu. Default H100.")
]


def mock_worker(
    key_file: KeyFile,
    size: Annotated[str, typer.Option(help="Prefill and decode workers, as PxD.")] = "1x1",
    colocated: Annotated[int, typer.Option(help="Workers that do both.")] = 0,
    stores: Annotated[int | None, typer.Option(help="1, or 2: one for each pool. Default 1.")] = None,
    prefix: Annotated[
        str, typer.Option(help="Begins the names of workers and stores, e.g. for a second such process.")
    ] = "",
    model: Model = "",
    router: Routers = None,
    time_scale: TimeScale = None,
    device: Device = "",
    fault: Annotated[
        list[str] | None,
        typer.Option(help="NAME:FAULTS from the start, e.g. decode-0:slow=3,lose_events=5; repeatable."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Loopback port for kvrelay fault; 0 takes a free one. Default 0.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Pretend to be workers and their stores, all in this process: everything of them but engines and KV bytes.

    Their routers cannot tell: they register, answer the OpenAI API, report pages and hand-offs, in the time that the
    model of an 8B transformer on --device takes. Needs the model's tokenizer, neither its weights nor vLLM nor torch.

    Example:  kvrelay mock-worker --size 4x4 --key-file key --router 127.0.0.1:7080
    """
    from kvrelay.deploy.mock.node import MockNode, NodePlan, run_node

    with reported():
        given = {"time_scale": time_scale, "device": device, "control_port": port}
        settings = load(config, mock=given, model={"path": model}, cluster={"stores": stores})
        routers, key = check_addresses("--router", router), read_key(key_file)
        prefill, decode = parse_size("--size", size)
        names = mock_names(prefill, decode, colocated, stores=settings.cluster.stores, prefix=prefix)
        plan = NodePlan(
            model_path=model_path(settings.model.path, weights=False),
            routers=routers,
            workers=names.plans(_faults(fault)),
            stores=names.stores,
        )

    def ready(node: MockNode) -> None:
        announce_ready(f"{len(node.workers)} mock workers, faults at {node.control_url}")

    run(run_node(settings, plan, key=key, ready=ready))


def _faults(given: list[str] | None) -> dict[str, Faults]:
    """Faults by worker. Raises ``Misconfigured``."""
    faults: dict[str, Faults] = {}
    for text in given or ():
        name, colon, said = text.partition(":")
        if not colon:
            raise Misconfigured(f"--fault {text} is not NAME:FAULTS; it looks like decode-0:hang=true")
        faults[name] = parse(said)
    return faults


def fault(
    port: Annotated[int, typer.Option(help="Where the mock workers take faults; they print it when they serve.")],
    key_file: KeyFile,
    worker: Annotated[str, typer.Argument(help="Its name; all are shown without one.")] = "",
    faults: Annotated[
        str,
        typer.Argument(help="In place of those it has, e.g. hang=true or slow=3,drop_after=5; the word none mends it."),
    ] = "",
) -> None:
    """Make mock workers hang, die, slow down, fail, break off, lose events or misread hand-offs; and mend them.

    hang=true: no step is taken. dead=true: gone without a goodbye; back when it is not dead. slow=3: steps take so many
    times as long. step_s=1: no step is shorter. status=500: the status of every answer. drop_after=5: answers break off
    after so many tokens. lose_events=2: so many messages about pages are lost. params=stale or params=garbage:
    hand-offs are misread. mute=true: its network is cut, and no connection is closed. clock_s=-25000: its clock is off
    by so much. Of stores: dead=true, mute=true, full=true (no slot is free) and apart=true (no other store reaches it).

    Example:  kvrelay fault decode-0 hang=true --port 7090 --key-file key
    """
    with reported():
        route = Route(port, engine_key(read_key(key_file)))
        shown = [route.give(worker, parse("" if faults == "none" else faults))] if faults else route.workers(worker)
        for each in shown:
            console.print(_line(each), markup=False, soft_wrap=True)


def _line(shown: Shown) -> str:
    said = ",".join(f"{key}={_as_given(value)}" for key, value in shown.given().items())
    return f"{shown.name}  {shown.url}  {said or 'well'}"


def _as_given(value: object) -> str:
    """As one writes it on the command line."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
