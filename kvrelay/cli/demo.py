"""``kvrelay demo``: the whole thing once, from nothing to an answer."""

from __future__ import annotations

import time

import msgspec
import typer
from rich.text import Text

from kvrelay.cli.ask import ask_and_draw
from kvrelay.cli.model import fetch_with_progress
from kvrelay.cli.startup import StartupView
from kvrelay.cli.terminal import INTERRUPTED, announce_stop, console, run, show
from kvrelay.config import Config, RouterConfig
from kvrelay.deploy.command import program

_QUESTION = (
    "Summarise this text in one short sentence.\n\n"
    "A cache is a small and fast memory for things that were used before. A web browser has a cache of pictures: a "
    "page that was seen before appears at once. A processor has a cache of numbers, since the main memory is a hundred "
    "times slower. A language model has a cache of keys and values, the KV cache: it holds what the model has "
    "understood of every word of the text so far. Thanks to the KV cache the model need not read the whole text again "
    "for every word that it writes. The cache fills up while the model reads the question, which is called prefill, "
    "and it is used while the model writes the answer, which is called decode. Both steps can be done by two different "
    "machines, if the cache is moved from the one to the other."
)
"""Long enough for its prefill to be seen, and easy enough for a model of 135 million parameters."""
_MAX_TOKENS = 96
_PLAN = (
    "kvrelay starts two vLLM workers, has one of them read a question and the other answer it, draws where the time "
    "went, and stops: about 40 s on two cores."
)


def demo() -> None:
    """Fetch the model, start a prefill and a decode worker, ask a question, draw its timeline, stop.

    The prompt is read by one vLLM process and the answer is written by another; the KV cache travels between them.

    Example:  kvrelay demo
    """
    started = time.monotonic()
    show(_PLAN)
    console.rule("1  model")
    fetch_with_progress(console)
    view = StartupView(console)

    def stopping() -> None:
        view.close()
        announce_stop()

    if run(_answer(view), stopping):
        raise typer.Exit(INTERRUPTED)
    console.print(f"\nThe whole demo took {time.monotonic() - started:.0f} s. Next: {program()} up")


async def _answer(view: StartupView) -> None:
    from kvrelay.deploy.local import LocalCluster

    config = msgspec.structs.replace(Config(), router=RouterConfig(port=0, control_port=0))
    console.rule("2  store, router, one prefill worker, one decode worker")
    with view:
        async with LocalCluster(config, on_progress=view.update) as cluster:
            view.close()
            console.rule("3  a question")
            show(Text(_QUESTION))
            console.rule("4  its answer, and where the time went")
            await ask_and_draw(cluster.url, _QUESTION, max_tokens=_MAX_TOKENS)
