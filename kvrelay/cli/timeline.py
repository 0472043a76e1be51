"""Draws where one request's time went. Pure: a record from ``/kvrelay/requests/ID`` in, lines out.

Each phase has its own glyph, so that the picture can be read without colour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.policy.whole import WholeReason
from kvrelay.types import CLIENT_CLOSED, Value

BAR_CELLS = 72
"""Fits 80 columns."""


class Phase(Value, frozen=True, kw_only=True):
    """One stretch of a request's life, in seconds since the router received it."""

    name: str
    start_s: float
    end_s: float
    glyph: str
    colour: str
    note: str = ""

    @property
    def seconds(self) -> float:
        return max(0.0, self.end_s - self.start_s)


_LOOKS = {
    "route": ("·", "cyan"),
    "wait for prefix": ("~", "white"),
    "admission": ("░", "white"),
    "queue": ("░", "white"),
    "prefill": ("█", "blue"),
    "transfer, exposed": ("▒", "magenta"),
    "first token": ("▓", "yellow"),
    "decode": ("=", "green"),
    "prefill and decode": ("=", "green"),
}
_UNREAD = frozenset(WholeReason)
_FIRST_FAILURE = 400
_TICKS = 10_000
"""Times are shown in tenths of a millisecond: phases that are rounded where they meet add up to the total."""


def phases(record: Mapping[str, Any]) -> list[Phase]:
    """The phases of ``record`` in order, without gaps: each ends where the next one starts."""
    events: Mapping[str, float] = record.get("events", {})
    begun, split = record.get("path") != "none", record.get("path") == "remote_prefill"
    cuts = _cuts(events, split=split) if begun else _cuts_of_unstarted(events)
    notes = _notes(record)
    made: list[Phase] = []
    start = events.get("received", 0.0)
    for name, moment in cuts:
        if moment is None:
            continue
        glyph, colour = _LOOKS[name]
        end = max(start, moment)
        made.append(Phase(name=name, start_s=start, end_s=end, glyph=glyph, colour=colour, note=notes.get(name, "")))
        start = end
    return made


def _cuts(events: Mapping[str, float], *, split: bool) -> list[tuple[str, float | None]]:
    """Each phase with the moment at which it ends; None when that moment was not seen."""
    first, finished = events.get("first_token"), events.get("finished")
    begin = [("route", events.get("routed", events.get("prefill_sent" if split else "decode_sent")))]
    if "prefix_ready" in events:
        begin = [("route", events.get("routed")), ("wait for prefix", events["prefix_ready"])]
    if not split and first is None:
        return [*begin, ("prefill and decode", finished)]
    if not split:
        return [*begin, ("prefill", first), ("decode", finished)]
    queue = [*begin, ("queue", events.get("prefill_started"))]
    if _overtaken(events):
        return [*queue, ("prefill", first), ("decode", finished)]
    loaded = events.get("loaded")
    if loaded is not None and first is not None and loaded > first:
        loaded = None  # heard late: D cannot have written before it had loaded
    return [
        *queue,
        ("prefill", events.get("prefill_finished")),
        ("transfer, exposed", loaded),
        ("first token", first),
        ("decode", finished),
    ]


def _cuts_of_unstarted(events: Mapping[str, float]) -> list[tuple[str, float | None]]:
    """Cuts of a request that was refused, or whose client left before its turn."""
    return [("route", events.get("tokenised")), ("admission", events.get("finished"))]


def _overtaken(events: Mapping[str, float]) -> bool:
    """D's first token was here before P's own answer, so nobody saw when the prefill ended."""
    return events.get("first_token", float("inf")) < events.get("prefill_finished", 0.0)


def _notes(record: Mapping[str, Any]) -> dict[str, str]:
    prompt, cached = record.get("prompt_tokens") or 0, record.get("cached_tokens")
    known = "" if cached is None else f", {cached} of them cached"  # where D computes the prompt itself nobody is told
    remote = record.get("path") == "remote_prefill"
    decoder = record.get("decode_worker")
    worker = record.get("prefill_worker") if remote else decoder
    about = "about " if is_guessed(record) else ""
    until = "; it ends with D's first token" if remote and _overtaken(record.get("events", {})) else ""
    return {
        "route": "tokenise, name the pages, choose the workers",
        "wait for prefix": _awaited(record),
        "admission": "it was not let in",
        "queue": f"way to {worker} and wait there",
        "prefill": f"{about}{prompt} tokens on {worker}{known}{until}",
        "transfer, exposed": "the part of the hand-off that nothing hides",
        "first token": _loaded(record),
        "decode": f"{record.get('output_tokens') or 0} tokens on {decoder}",
        "prefill and decode": _read_and_written(record),
    }


def is_guessed(record: Mapping[str, Any]) -> bool:
    """Whether nobody tokenised the prompt, so that its length is guessed from that of its text."""
    return record.get("local_reason") in _UNREAD


def answered(record: Mapping[str, Any]) -> str:
    """How a request that was begun ended, where that was not well; else empty."""
    status, why = record.get("status"), record.get("failure") or ""
    if status is None or status < _FIRST_FAILURE or record.get("path") == "none":
        return ""
    if status == CLIENT_CLOSED:
        return "its client went away before the end"
    if record.get("events", {}).get("first_token") is not None and not why:
        return f"its answer broke off ({status})"
    return f"answered {status}: {why}" if why else f"answered {status}"


def _read_and_written(record: Mapping[str, Any]) -> str:
    decoder, prompt = record.get("decode_worker"), record.get("prompt_tokens") or 0
    about = "about " if is_guessed(record) else ""
    if answered(record):
        return f"{about}{prompt} tokens sent to {decoder}"
    return f"{about}{prompt} tokens read, {record.get('output_tokens') or 0} written by {decoder}"


def _awaited(record: Mapping[str, Any]) -> str:
    wait = (record.get("waits") or [{}])[0]
    if wait.get("source") == "peer":
        return f"{wait.get('tokens', 0)} tokens from {wait.get('origin', '')}: {wait.get('ending', '')}"
    return f"{wait.get('tokens', 0)} tokens that another request computed: {wait.get('ending', '')}"


def _loaded(record: Mapping[str, Any]) -> str:
    """What D had to do before its first token, as far as it is known: D always computes the prompt's last token."""
    decoder, prompt = record.get("decode_worker"), record.get("prompt_tokens") or 0
    loaded = (record.get("transfer") or {}).get("loaded_tokens") or 0
    if loaded == 0:
        return f"{decoder} loaded nothing: it had the tokens or computed them"
    if loaded >= prompt - 1:
        return f"{decoder} loaded the prompt, computed its end"
    return f"{decoder} loaded {loaded} of {prompt} tokens; it had or computed the others"


def cells(parts: list[Phase], width: int) -> list[int]:
    """How many of ``width`` cells each phase gets: at least one each that took any time, in proportion otherwise."""
    total = sum(part.seconds for part in parts)
    if total <= 0:
        return [0] * len(parts)
    shares = [part.seconds / total * width for part in parts]
    given = [max(1, int(share)) if part.seconds > 0 else 0 for part, share in zip(parts, shares, strict=True)]
    while (missing := width - sum(given)) != 0:
        # Give to the phase that lost most by rounding; take from the longest.
        position = max(range(len(parts)), key=lambda i: shares[i] - given[i] if missing > 0 else given[i])
        given[position] += 1 if missing > 0 else -1
    return given


def draw(record: Mapping[str, Any]) -> RenderableType:
    """The bar, the hand-off below it, and the legend."""
    parts = phases(record)
    widths = cells(parts, BAR_CELLS)
    bar = Text()
    for part, width in zip(parts, widths, strict=True):
        bar.append(part.glyph * width, style=part.colour)
    lines: list[RenderableType] = [_headline(record, parts), bar]
    if (hand_off := _hand_off(record, parts, widths)) is not None:
        lines.append(hand_off)
    if ending := answered(record):
        lines.append(Text(ending[:1].upper() + ending[1:], style="bold red"))
    lines.append(_legend(parts))
    if (moved := _moved(record, parts)) is not None:
        lines.append(moved)
    return Group(*lines)


def _headline(record: Mapping[str, Any], parts: list[Phase]) -> Text:
    total_ms = sum(part.seconds for part in parts) * 1000
    first = record.get("events", {}).get("first_token")
    text = Text(f"{record.get('request_id', '')}  {total_ms:,.0f} ms", style="bold")
    return text.append(f", first token after {first * 1000:,.0f} ms" if first is not None else "", style="not bold")


def _hand_off(record: Mapping[str, Any], parts: list[Phase], widths: list[int]) -> Text | None:
    """A second row: where the transfer ran, under the prefill that hides it and beyond."""
    hidden_s = (record.get("transfer") or {}).get("hidden_s") or 0.0
    by_name = {part.name: (part, width) for part, width in zip(parts, widths, strict=True)}
    if "prefill" not in by_name or not record.get("transfer"):
        return None
    prefill, prefill_cells = by_name["prefill"]
    before = sum(widths[: parts.index(prefill)])
    hidden = round(prefill_cells * min(1.0, hidden_s / prefill.seconds)) if prefill.seconds else 0
    glyph, colour = _LOOKS["transfer, exposed"]
    row = Text(" " * before).append("-" * hidden, style=colour)
    if "transfer, exposed" in by_name:
        row.append(" " * (prefill_cells - hidden)).append(glyph * by_name["transfer, exposed"][1], style=colour)
    row.rstrip()
    return row if row.plain else None


def _legend(parts: list[Phase]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for part in parts:
        table.add_row(Text(part.glyph * 2, style=part.colour), part.name, _ms(part.start_s, part.end_s), part.note)
    if parts:
        table.add_row("", "total", _ms(parts[0].start_s, parts[-1].end_s), "")
    return table


def _moved(record: Mapping[str, Any], parts: list[Phase]) -> Text | None:
    """What went on below the phases: it is no phase of its own, so it adds nothing to the total."""
    transfer = record.get("transfer")
    if not transfer:
        return None
    computed_s = sum(part.seconds for part in parts if part.name == "prefill")
    hidden_s = min(computed_s, transfer.get("hidden_s") or 0.0)
    text = Text("-- ", style="magenta")
    return text.append(
        f"hand-off, hidden: for {_ms(0.0, hidden_s)} layers were handed over ({_way(transfer)}) while the prompt was "
        f"computed{_late(transfer)}",
        style="default",
    )


def _way(transfer: Mapping[str, Any]) -> str:
    """What the pages came by; the speed is that of the wire, without the waits for the next layer."""
    size_bytes, speed = transfer.get("bytes") or 0, transfer.get("gb_per_s")
    if not size_bytes:
        return "in shared memory"
    at = f" at {float(f'{speed:.2g}'):g} GB/s" if speed else ""  # 190, not 1.9e+02
    return f"{size_bytes / 1e6:,.1f} MB over {transfer.get('transport') or 'the wire'}{at}"


def _late(transfer: Mapping[str, Any]) -> str:
    size_bytes, late_bytes = transfer.get("bytes") or 0, transfer.get("late_bytes")
    if not size_bytes or late_bytes is None:
        return ""
    return f"; {late_bytes / size_bytes:.1%} of the bytes came after it"


def _ms(start_s: float, end_s: float) -> str:
    ticks = round(max(start_s, end_s) * _TICKS) - round(start_s * _TICKS)
    return f"{ticks / (_TICKS / 1000):,.1f} ms"
