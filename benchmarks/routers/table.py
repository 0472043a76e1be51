"""The table of the routers. It measures nothing, and hides no miss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvrelay.types import Value

_FLAT_MB = 5.0
"""Growth since the first measurement after half of the requests that still counts as none."""


class Row(Value, frozen=True, kw_only=True):
    """One figure beside the peers' and its target."""

    what: str
    ours: str
    vllm: str = "-"
    dynamo: str = "-"
    target: str = "-"
    met: bool | None = None
    """None: no peer to compare with, or no target."""


def rows(found: dict[str, Any]) -> list[Row]:
    """The rows of what was measured; a stage that did not run gives none."""
    return [row for make in (_routed, _first_tokens, _proxied, _memory) for row in make(found)]


def render(found: dict[str, Any]) -> str:
    """All rows in columns."""
    head = ("", "kvrelay", "vllm-router", "Dynamo", "target", "")
    met = {True: "met", False: "MISSED", None: ""}
    cells = [head, *((row.what, row.ours, row.vllm, row.dynamo, row.target, met[row.met]) for row in rows(found))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([*lines, "", *_notes(found)])


def _at(found: dict[str, Any], *path: str) -> Any:
    """The figure at ``path``; None when it was not measured."""
    for key in path:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return found if found != {} else None


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.4g}{unit}"


def _routed(found: dict[str, Any]) -> Iterator[Row]:
    for part, most_ms in (("short", 1.1), ("long", 6.4)):
        ours, theirs = (_at(found, name, part) for name in ("kvrelay", "dynamo"))
        vllm = _at(found, "vllm-router", part)
        if ours is None:
            continue
        for key, unit in (("requests_per_s", ""), ("router_cpu_ms", " ms")):
            mine, peer = ours[key], theirs and theirs[key]
            better = None if peer is None else (mine >= peer if key == "requests_per_s" else mine <= max(peer, most_ms))
            what = "requests/s" if key == "requests_per_s" else "router CPU a request"
            yield Row(
                what=f"split, 64 clients, {part} prompts: {what}",
                ours=_number(mine, unit),
                vllm=_number(vllm and vllm[key], unit),
                dynamo=_number(peer, unit),
                target=">= Dynamo's" if key == "requests_per_s" else f"<= Dynamo's or {most_ms} ms",
                met=better,
            )


def _first_tokens(found: dict[str, Any]) -> Iterator[Row]:
    for key, most_ms in (("p50_ms", 2.0), ("p99_ms", 6.0)):
        alone, ours = _at(found, "mocks", "ttft", key), _at(found, "kvrelay", "ttft", key)
        if alone is None or ours is None:
            continue
        peers = [_at(found, name, "ttft", key) for name in ("vllm-router", "dynamo")]
        vllm, dynamo = (None if peer is None else peer - alone for peer in peers)
        yield Row(
            what=f"added to TTFT at 50 streams/s, {key[:3]} (the mock alone: {alone:.2f} ms)",
            ours=_number(ours - alone, " ms"),
            vllm=_number(vllm, " ms"),
            dynamo=_number(dynamo, " ms"),
            target=f"<= {most_ms:g} ms",
            met=ours - alone <= most_ms,
        )


def _proxied(found: dict[str, Any]) -> Iterator[Row]:
    """A plain proxy of ours against the peer's split, by which the target was set, and against its plain one."""
    for part, key, what, least in (
        ("short", "requests_per_s_per_core", "requests/s per core", 0.3),
        ("chunks", "chunks_per_s_per_core", "chunks/s per core", 0.5),
    ):
        ours = _at(found, "kvrelay-proxy", part, key)
        if ours is None:
            continue
        for name, kind in (("vllm-router", "split"), ("vllm-router-proxy", "round robin")):
            peer = _at(found, name, part, key)
            if peer is None:
                continue
            yield Row(
                what=f"no KV routing: {what} (peer: {kind}); ratio {ours / peer:.2f}",
                ours=_number(ours),
                vllm=_number(peer),
                target=f">= {least:g} x its split" if kind == "split" else "-",
                met=ours / peer >= least if kind == "split" else None,
            )


def _memory(found: dict[str, Any]) -> Iterator[Row]:
    ours, vllm = (_at(found, f"{name}-memory", "rss_mb") for name in ("kvrelay", "vllm-router"))
    if ours is None:
        return
    requests = _at(found, "kvrelay-memory", "requests")
    steps, middle = len(ours) - 1, len(ours) // 2
    grown, last = ours[-1] - ours[middle], requests * (steps - middle) // steps
    yield Row(
        what=f"memory after {requests:,} distinct prefixes (last {last:,}: {grown:+.1f} MB)",
        ours=_number(ours[-1], " MB"),
        vllm=_number(vllm and vllm[-1], " MB"),
        target=f"<= 300 MB, flat within {_FLAT_MB:g}",
        met=ours[-1] <= 300 and grown <= _FLAT_MB,
    )


def _notes(found: dict[str, Any]) -> Iterator[str]:
    """Who could not go faster, run by run."""
    yield "Cores used in each run (of two in all), and whose core was full:"
    for stage, figures in found.items():
        for part, seen in figures.items() if isinstance(figures, dict) else ():
            if isinstance(seen, dict) and "cores" in seen:
                used = ", ".join(f"{name} {share:.2f}" for name, share in seen["cores"].items())
                yield f"  {stage:<18} {part:<7} {used}; full: {seen['bottleneck']}"
    if reason := _at(found, "dynamo", "left_out"):
        yield f"Dynamo was left out: {reason}"
