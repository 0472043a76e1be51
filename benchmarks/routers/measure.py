"""What is measured of a router, whichever it is."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from typing import Any

import msgspec
import psutil

from benchmarks.routers.clients import Seen, Spec
from benchmarks.routers.subject import ROOT, STREAM_TICK_S, Subject

CLIENTS = 64
RATE = 50.0
FEW_TOKENS = 2
TTFT_TOKENS = 8
STREAM_TOKENS = 200
_FULL_CORE = 0.9


async def seen_by_clients(spec: Spec) -> Seen:
    """Run the clients in a process of their own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(spec))
        file.flush()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.routers.clients", file.name, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"the clients ended with {child.returncode}")
    seen = msgspec.json.decode(output, type=Seen)
    if seen.failed or not seen.requests:
        raise RuntimeError(f"{seen.failed} of {seen.requests} requests failed")
    return seen


def _spec(subject: Subject, texts: list[str], **more: Any) -> Spec:
    return Spec(port=subject.port, model=subject.model, texts=texts, pids=subject.pids, **more)


async def throughput(subject: Subject, texts: list[str], seconds: float, first: int = 0) -> dict[str, Any]:
    """A closed loop of short answers."""
    seen = await seen_by_clients(
        _spec(subject, texts, max_tokens=FEW_TOKENS, clients=CLIENTS, seconds=seconds, warm_s=seconds / 4, first=first)
    )
    cpu_ms = 1e3 * seen.cpu_s["router"] / seen.requests
    return {
        "requests_per_s": round(seen.requests / seen.seconds, 1),
        "router_cpu_ms": round(cpu_ms, 4),
        "requests_per_s_per_core": round(1e3 / cpu_ms, 1),
        "p50_ms": round(seen.p50_ms, 2),
        "p99_ms": round(seen.p99_ms, 2),
        **_shares(seen),
    }


async def first_tokens(subject: Subject, texts: list[str], seconds: float, first: int = 0) -> dict[str, Any]:
    """Streams that arrive at a rate."""
    seen = await seen_by_clients(
        _spec(subject, texts, max_tokens=TTFT_TOKENS, stream=True, rate=RATE, seconds=seconds, warm_s=2.0, first=first)
    )
    return {"n": seen.requests, "p50_ms": round(seen.p50_ms, 3), "p99_ms": round(seen.p99_ms, 3), **_shares(seen)}


async def chunks(subject: Subject, texts: list[str], seconds: float) -> dict[str, Any]:
    """As many streams as clients, each of a chunk every ``STREAM_TICK_S``."""
    seen = await seen_by_clients(
        _spec(
            subject, texts, max_tokens=STREAM_TOKENS, stream=True, clients=CLIENTS, seconds=seconds, warm_s=seconds / 4
        )
    )
    return {
        "offered_per_s": round(CLIENTS / STREAM_TICK_S),
        "chunks_per_s": round(seen.events / seen.seconds),
        "chunks_per_s_per_core": round(seen.events / seen.cpu_s["router"]),
        **_shares(seen),
    }


async def memory(subject: Subject, texts: list[str], requests: int, steps: int) -> dict[str, Any]:
    """Resident memory after each of ``steps`` equal shares of ``requests``, no two of which share a prefix."""
    rss_mb, number = [resident_mb(subject)], 0
    for _ in range(steps):
        spec = _spec(subject, texts, max_tokens=FEW_TOKENS, clients=CLIENTS, requests=requests // steps, first=number)
        number = (await seen_by_clients(msgspec.structs.replace(spec, warm_s=0.0))).next
        rss_mb.append(resident_mb(subject))
    return {"requests": requests, "rss_mb": rss_mb}


def resident_mb(subject: Subject) -> float:
    """Of the router and its children, in 10^6 bytes."""
    root = psutil.Process(subject.router_pid)
    return round(sum(each.memory_info().rss for each in (root, *root.children(recursive=True))) / 1e6, 1)


def _shares(seen: Seen) -> dict[str, Any]:
    """Cores that each side used, and who had no more to give."""
    cores = {name: round(used_s / seen.seconds, 2) for name, used_s in seen.cpu_s.items()}
    full = [name for name, share in cores.items() if share >= _FULL_CORE]
    return {"cores": cores, "bottleneck": " and ".join(full) or "nobody"}
