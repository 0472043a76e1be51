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
from kvrelay.deploy.local import LocalCluster

_QUESTION = (
    "Read this, then answer in two or three sentences: why does it help to split prefill from decode?\n\n"
    "A language model answers in two phases. First it reads the whole prompt at once; this is called prefill, and it "
    "keeps every core of a machine busy with large matrix products. What it has understood of each token is kept in "
    "memory, in the so-called KV cache. Then it writes its answer one token after the other; this is called decode, "
    "and each step reads the whole KV cache again but computes little. When both phases share a machine, a long prompt "
    "that is being read stops all the answers that are being written: the text on the screens of the other users "
    "stands still for seconds. When they run on different machines, answers flow evenly, and each pool of machines can "
    "be as large as its own work needs. The price is that the KV cache has to travel from the machine that read the "
    "prompt to the one that writes the answer."
)
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
    config = msgspec.structs.replace(Config(), router=RouterConfig(port=0, control_port=0))
    console.rule("2  store, router, one prefill worker, one decode worker")
    with view:
        async with LocalCluster(config, on_progress=view.update) as cluster:
            view.close()
            console.rule("3  a question")
            show(Text(_QUESTION))
            console.rule("4  its answer, and where the time went")
            await ask_and_draw(cluster.url, _QUESTION, max_tokens=_MAX_TOKENS)
