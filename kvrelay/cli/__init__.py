"""The command line: parses flags, calls the package, prints. It decides nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay import __version__
from kvrelay.cli.ask import ask
from kvrelay.cli.chaos import chaos
from kvrelay.cli.demo import demo
from kvrelay.cli.doctor import doctor
from kvrelay.cli.drain import drain
from kvrelay.cli.explain import explain
from kvrelay.cli.mock import fault, mock_worker
from kvrelay.cli.model import model
from kvrelay.cli.serve import router, store, worker
from kvrelay.cli.up import up

app = typer.Typer(
    help="Serve one LLM from two pools of vLLM workers (prefill and decode) and move the KV cache between them.\n\n"
    "First steps:  kvrelay model fetch;  kvrelay up;  and in another terminal:  kvrelay ask 'What is a KV cache?'",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvrelay {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


for command in (up, ask, explain, demo, doctor, drain, store, router, worker, mock_worker, fault, chaos):
    app.command()(command)
app.add_typer(model, name="model")
