"""The rows of the hand-off's table, read from the figures of its stages. It measures nothing and hides no miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.peers.mooncake import LEFT_OUT
from benchmarks.transports import SOCKETS
from kvrelay.types import Value

_PEERS = ("pull", "push")


class Row(Value, frozen=True, kw_only=True):
    """One figure beside the peer's and its target."""

    what: str
    peer: str
    ours: str
    target: str
    met: bool


Figures = dict[str, Any]


def rows(found: Figures) -> list[Row]:
    """The rows of every stage in ``found``; a stage that did not run gives none."""
    makers = (_exposed, _load, _wire, _overhead, _itl, _idle, _link, _arena, _transports)
    return [row for make in makers for row in make(found)]


def _beside(found: Figures, read: Callable[[Figures], float], unit: str = "ms") -> str:
    """The peers' figures, e.g. ``pull 12 / push 14 ms``."""
    known = [f"{name} {read(found[name]):g}" for name in _PEERS if name in found]
    return f"{' / '.join(known)} {unit}" if known else "-"


def _mooncake(stage: Figures, read: Callable[[Figures], float], form: str) -> str:
    """Its figure in ``stage``, written as ``form``, or why there is none."""
    peer = stage.get("mooncake")
    if peer is None:
        return "-"
    return f"no Mooncake: {peer[LEFT_OUT]}" if LEFT_OUT in peer else f"Mooncake {form.format(read(peer))}"


def _exposed(found: Figures) -> Iterator[Row]:
    figures = found.get("ours", {}).get("exposed", {})
    for tokens in (key for key in figures if key.isdigit()):

        def left(stage: Figures, tokens: str = tokens) -> float:
            return float(stage["exposed"][tokens]["exposed_ms"])

        yield Row(
            what=f"P's response to D's first token, less a one-token prompt; idle, {tokens} tokens",
            peer=_beside(found, left),
            ours=f"{left(found['ours']):g} ms",
            target="<= 10 ms",
            met=left(found["ours"]) <= 10,
        )


def _load(found: Figures) -> Iterator[Row]:
    if "ours" not in found:
        return
    step_ms = float(found["ours"]["load"]["stream_itl"]["p50_ms"])
    for percentile, most_ms in (("p50_ms", 50), ("p99_ms", 100)):

        def gap(stage: Figures, percentile: str = percentile) -> float:
            return float(stage["load"]["gap"][percentile])

        yield Row(
            what=f"P's response to D's first token; mixed load, {percentile[:3]}",
            peer=_beside(found, gap),
            ours=f"{gap(found['ours']):g} ms ({gap(found['ours']) / step_ms:.1f} of D's steps)",
            target=f"<= {most_ms} ms",
            met=gap(found["ours"]) <= most_ms,
        )

    def ttft(stage: Figures) -> float:
        return round(float(stage["load"]["stream_ttft"]["p50_ms"]) / 1e3, 2)

    peers = [ttft(found[name]) for name in _PEERS if name in found]
    if not peers:
        return
    yield Row(
        what="TTFT of short prompts; mixed load, p50",
        peer=_beside(found, ttft, "s"),
        ours=f"{ttft(found['ours']):g} s",
        target="far below the peer's",
        met=ttft(found["ours"]) < min(peers) / 2,
    )


def _wire(found: Figures) -> Iterator[Row]:
    figures = found.get("stores", {}).get("wire")
    if figures is None:
        return
    left, warm = figures["left_share"], figures["warm_share"]
    yield Row(
        what="bytes still to move when the prefill ends, 3,000 tokens",
        peer="100 % (moves after the prefill)",
        ours=f"{left:.1%}",
        target="<= 5 %",
        met=left <= 0.05,
    )
    yield Row(
        what="share of a warm prompt's bytes that travel again",
        peer="100 %",
        ours=f"{warm:.1%}",
        target="0",
        met=warm == 0,
    )


def _overhead(found: Figures) -> Iterator[Row]:
    for tokens, figures in found.get("overhead", {}).get("prefill", {}).items():
        yield Row(
            what=f"prefill with the connector / without, {tokens} tokens",
            peer="-",
            ours=f"{figures['ratio']:g}",
            target="<= 1.03",
            met=figures["ratio"] <= 1.03,
        )


def _itl(found: Figures) -> Iterator[Row]:
    figures = found.get("stores", {}).get("itl")
    if figures is not None:
        yield Row(
            what="D's ITL p99 while another request's KV arrives / without",
            peer="-",
            ours=f"{figures['ratio']:g} ({figures['ratio_to_computing']:g} to P at work without a hand-off)",
            target="<= 1.10",
            met=figures["ratio"] <= 1.10,
        )


def _idle(found: Figures) -> Iterator[Row]:
    figures = found.get("overhead", {}).get("idle")
    if figures is not None:
        yield Row(
            what="idle cluster of two workers, beyond vLLM's own",
            peer="-",
            ours=f"{figures['cluster']:.1%} of a core",
            target="< 2 %",
            met=figures["cluster"] < 0.02,
        )


def _link(found: Figures) -> Iterator[Row]:
    figures = found.get("link", {})
    if "exposed_share" in figures:
        yield Row(
            what="link of 1 Gbit/s, 3,000 tokens, simulated prefill: exposed transfer / serial transfer",
            peer="1 (moves after the prefill)",
            ours=f"{figures['exposed_share']:g}",
            target="<= 0.15",
            met=figures["exposed_share"] <= 0.15,
        )


def _arena(found: Figures) -> Iterator[Row]:
    figures = found.get("arena")
    if figures is None:
        return
    for act in ("put", "get"):

        def share(stage: Figures, act: str = act) -> float:
            return float(figures["copy_ms"] / stage[f"{act}_ms"])

        yield Row(
            what=f"arena, {act} against memcpy",
            peer=_mooncake(figures, share, "{:.2f}"),
            ours=f"{share(figures):.2f}",
            target=">= 0.6",
            met=share(figures) >= 0.6,
        )
    for where, most_ms in (("exists", 0.3), ("exists_remote", 0.5)):
        taken_ms = figures.get(f"{where}_ms")
        yield Row(
            what=f"exists, 200 names, {'local' if where == 'exists' else 'another store over TCP, loopback'}",
            peer=_mooncake(figures, lambda peer: float(peer["exists_ms"]), "{:.3f} ms"),
            ours="not measured" if taken_ms is None else f"{taken_ms:.3f} ms",
            target=f"<= {most_ms:g} ms",
            met=taken_ms is not None and taken_ms <= most_ms,
        )


_LEAST_GB_PER_S = {"64 MB": ("tcp, one stream", 2.5), "1,024 x 16 KiB": ("tcp", 1.5)}


def _transports(found: Figures) -> Iterator[Row]:
    for load, (transport, least) in _LEAST_GB_PER_S.items():
        speeds = found.get("transports", {}).get(load)
        if speeds is None:
            continue
        raw = speeds.get("NIXL alone")
        yield Row(
            what=f"{load}, store to store, {transport}, loopback",
            peer=_beside_sockets(found["transports"], load),
            ours=f"{speeds[transport]:g} GB/s",
            target=f">= {least:g} GB/s",
            met=speeds[transport] >= least,
        )
        if raw is not None:
            yield Row(
                what=f"{load}, store to store over NIXL / NIXL alone",
                peer=f"NIXL alone {raw:g} GB/s",
                ours=f"{speeds['nixl'] / raw:.2f}",
                target=">= 0.8",
                met=speeds["nixl"] / raw >= 0.8,
            )


def _beside_sockets(figures: Figures, load: str) -> str:
    known = []
    if SOCKETS in figures[load]:
        known.append(f"{SOCKETS} {figures[load][SOCKETS]:g} GB/s")
    if "mooncake" in figures:
        known.append(_mooncake(figures, lambda peer: float(peer[load]), "{:g} GB/s"))
    return ", ".join(known) or "-"


def render(table: Sequence[Row]) -> str:
    """The rows as aligned text; what missed its target says so."""
    head = ("what", "peer, in this run", "ours", "target", "")
    cells = [head, *((row.what, row.peer, row.ours, row.target, "" if row.met else "MISSED") for row in table)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
