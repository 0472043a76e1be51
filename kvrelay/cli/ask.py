"""``kvrelay ask``: one question, its answer as it comes, and where the time went."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.prose import Prose
from kvrelay.cli.silence import told
from kvrelay.cli.terminal import INTERRUPTED, console, errors, run, show
from kvrelay.cli.timeline import draw


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    url: Annotated[str, typer.Option(help="Where the router is, with or without /v1.")] = "http://127.0.0.1:8000",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 200,
    api_key: Annotated[
        str, typer.Option(envvar="KVRELAY_API_KEY", help="Bearer token, when the router wants one.", show_default=False)
    ] = "",
) -> None:
    """Ask a running cluster, stream the answer, then draw the request's timeline.

    The bar shows where the time went: routing, the wait at the prefill worker, the prefill, the part of the KV
    hand-off that the prefill did not hide, the first token, the decode. The row below it shows the hand-off itself.

    Example:  kvrelay ask "What is the capital of France?" --max-tokens 50
    """
    if run(ask_and_draw(url, question, max_tokens=max_tokens, api_key=api_key)):
        raise typer.Exit(INTERRUPTED)


def _why_silent(away: list[str], *, begun: bool) -> str:
    """Why no word comes, as far as is known of workers that are ``away``, and of an answer that has ``begun``."""
    if away:
        return f"{', '.join(away)} not ready"
    return "all workers say that they are ready" if begun else "the prompt waits for its turn or is being read"


async def ask_and_draw(url: str, question: str, *, max_tokens: int, api_key: str = "") -> None:
    from kvrelay.cli.chat import ChatClient  # aiohttp: half of what starting a command costs

    async with ChatClient(url, api_key) as client:
        prose = Prose(console.file, console.width)

        async def tell(waited_s: float) -> None:
            why = _why_silent(await client.unready(), begun=prose.begun)
            if console.is_terminal and errors.is_terminal:
                prose.interrupt()
            errors.print(f"no word for {waited_s:g} s, still waiting: {why}", style="dim", markup=False)

        try:
            async for piece in told(client.ask(question, max_tokens=max_tokens), tell):
                prose.write(piece)
        finally:
            prose.end()  # an error, or the shell's prompt, begins on a line of its own
        console.print()
        if client.request_id:
            show(draw(await client.whole_timeline()))
