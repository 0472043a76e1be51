"""``kvrelay explain``: why a request went where it went, what that was predicted to cost, and what really happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.cli.terminal import INTERRUPTED, run, show
from kvrelay.cli.timeline import draw

ROWS = {
    "queue": "wait at P",
    "source": "wait for cached KV",
    "prefill": "prefill",
    "transfer": "hand-off, exposed",
    "decode_wait": "wait at D",
    "answer": "first token",
    "ttft": "time to first token",
    "harm": "harm to others",
    "effort": "price of P's time",
    "pressure": "price of KV",
    "total": "cost",
    "tpot": "time per token",
}
"""What the router calls an item, and how it is shown; in the order in which they add up."""
SUMS = frozenset({"ttft", "total"})
MAX_RUNNERS_UP = 3
LOSSES = {
    "reset": "hung up",
    "failed": "failed",
    "unasked": "could not be reached or took no request",
    "gave_up": "ended its answer early",
    "silent": "stood still",
    "gone": "was gone",
    "forgotten": "made no progress with this answer",
    "drained": "was drained",
}
"""How the loss of a worker showed, in words; the reason itself is a label of metrics."""
MANNERS = {
    "continue": "from what was written",
    "replay": "asked again, with what was written forced",
    "restart": "asked again from the beginning",
}
"""How an answer went on, in words."""
DESPITE = {
    "guess": "Predicted later, and let in all the same: nobody is refused on what comes from data sheets.",
    "trial": "Predicted later, and let in all the same: it was alone, and now and then one has to show whether the "
    "predictions still hold.",
}
"""Why a request was let in that was predicted to miss its promise, in words."""
BELOW = "\u2193"
"""Actual seconds of this row are in those of a row below it: nobody sees where the one ends and the other begins."""


def explain(
    request_id: Annotated[str, typer.Argument(help="The x-request-id of its answer.", show_default=False)],
    url: Annotated[str, typer.Option(help="Where the router is, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="KVRELAY_API_KEY", help="Bearer token, when the router wants one.", show_default=False)
    ] = "",
) -> None:
    """Draw why a request went where it went: predicted and actual seconds, and the next best choices.

    Every row is one item of the cost; a column is one way to serve the request. The router keeps the last 1,000
    requests, and 250 that it turned away, and gives the same as JSON at /kvrelay/requests/REQUEST_ID.

    Example:  kvrelay explain req-8f3c21d0a9b14c6e7f201a55
    """
    if run(_explain(url, request_id, api_key)):
        raise typer.Exit(INTERRUPTED)


async def _explain(url: str, request_id: str, api_key: str) -> None:
    from kvrelay.cli.chat import ChatClient

    async with ChatClient(url, api_key) as client:
        show(explanation(await client.timeline(request_id)))


def explanation(record: Mapping[str, Any]) -> RenderableType:
    """The request's timeline, and a table for the decision that began it."""
    decisions = record.get("decision") or []
    losses = [Text(_told(loss)) for loss in record.get("resumptions") or []]
    if not decisions:
        return Group(draw(record), Text(_why_unstarted(record)))
    further = len(decisions) - 1
    parts: list[RenderableType] = [draw(record), Text(""), _headline(record, decisions[0])]
    parts.append(table(decisions[0], record.get("actual") or {}))
    if (routed_s := record.get("events", {}).get("routed")) is not None:
        parts.append(Text(f"Counted from this choice on, {_ms(routed_s)} ms after the request was received."))
    if (record.get("actual") or {}).get("together"):
        parts.append(Text(f"{BELOW} seen together with the next row that has a number"))
    if guesses := [ROWS[name] for name in decisions[0].get("guesses") or ()]:
        parts.append(Text(f"Not learned yet: {', '.join(guesses)}. It comes from data sheets until answers teach it."))
    parts += [Text(line) for line in _promised(record)]
    parts += losses
    if further:
        parts.append(Text(f"{further} more choices (further prompts or retries) are in the JSON of this request."))
    return Group(*parts)


def _headline(record: Mapping[str, Any], decision: Mapping[str, Any]) -> Text:
    text = Text("chosen: ", style="bold").append(_name(decision), style="bold green")
    if record.get("path") == "none":
        return Text(f"{_why_unstarted(record)}\nThe best way was ").append(_name(decision), style="bold")
    why = record.get("local_reason")
    cached, source = decision.get("cached_tokens", 0), decision.get("source", "")
    if why:
        text.append(f", not split ({why})", style="not bold")
    return text.append(f"; {cached} tokens expected cached ({source})" if cached else "", style="not bold")


def _promised(record: Mapping[str, Any]) -> Iterator[str]:
    """What it was promised, and why it was let in when that was not to be kept."""
    promise = record.get("promise") or {}
    times = {"first token within": promise.get("ttft_s"), "time per token": promise.get("tpot_s")}
    if told := [f"{what} {_ms(seconds)} ms" for what, seconds in times.items() if seconds is not None]:
        yield f"Promised: {', '.join(told)}."
    if despite := promise.get("despite"):
        yield DESPITE.get(despite, despite)


def _why_unstarted(record: Mapping[str, Any]) -> str:
    refusal = record.get("refusal")
    return f"It was turned away: {refusal}." if refusal else "Its client left before it was let in."


def _told(loss: Mapping[str, Any]) -> str:
    """One lost decode worker in a sentence."""
    seen = LOSSES.get(loss["reason"], "was lost")
    begin = f"{loss['lost_worker']} {seen} after {loss['tokens']} tokens ({loss['reason']}); "
    if loss["outcome"] != "resumed":
        return f"{begin}nobody went on"
    cached = f", with {loss['cached_tokens']} tokens from caches" if loss.get("cached_tokens") else ""
    strategy = f", by {loss['strategy']}" if loss.get("strategy") else ""
    manner = MANNERS.get(loss["manner"], loss["manner"])
    pause = f" after a pause of {_ms(loss.get('pause_s'))} ms"
    return f"{begin}{loss['worker']} went on{pause}{cached} ({manner}{strategy})"


def _name(option: Mapping[str, Any]) -> str:
    prefill = option.get("prefill_worker")
    return f"{prefill} > {option['decode_worker']}" if prefill else f"{option['decode_worker']} alone"


def table(decision: Mapping[str, Any], actual: Mapping[str, Any]) -> Table:
    """Items as rows; predicted, actual and the runners-up as columns, in milliseconds."""
    others = (decision.get("runners_up") or [])[:MAX_RUNNERS_UP]
    made = Table(box=None, padding=(0, 1))
    made.add_column("ms")
    made.add_column("predicted", justify="right", style="green")
    made.add_column("actual", justify="right", style="bold")
    for number, other in enumerate(others, 1):
        made.add_column(f"or {_name(other)}" if number == 1 else _name(other), justify="right")
    columns = [{name: _ms(seconds) for name, seconds in _seconds(option)} for option in (decision, actual, *others)]
    columns[1] |= _together(actual)
    for name, shown in ROWS.items():
        cells = [column.get(name, "") for column in columns]
        if any(cells):
            made.add_row(shown, *cells, style="bold" if name in SUMS else None)
    return made


def _together(actual: Mapping[str, Any]) -> dict[str, str]:
    """Cells of the items that were seen as one: the last row of them has the seconds of all."""
    cells: dict[str, str] = {}
    for stretch in actual.get("together") or ():
        *before, last = sorted(stretch["items"], key=list(ROWS).index)
        cells |= dict.fromkeys(before, BELOW) | {last: _ms(stretch["seconds"])}
    return cells


def _seconds(option: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield from (option.get("cost_s") or {}).items()
    for name in ("ttft", "total", "tpot"):
        if (seconds := option.get(f"{name}_s")) is not None:
            yield name, seconds


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.1f}"
