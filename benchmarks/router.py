"""kvrelay's router beside vllm-router and NVIDIA Dynamo's frontend, on mock engines that cost next to nothing.

    python -m benchmarks.router [--quick] [STAGE ...]

Processor time of the router's own process is what counts: clients and mocks share the cores with it. Everything runs in
a network namespace of its own where the machine can make one; without one Dynamo is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from benchmarks.peers import dynamo_frontend, vllm_router
from benchmarks.progress import Say, say_with_clock
from benchmarks.results_file import Found, keep, read
from benchmarks.routers import enclosure, measure, mocks_alone
from benchmarks.routers.ours import COLOCATED, kvrelay
from benchmarks.routers.subject import STREAM_TICK_S, Subject
from benchmarks.routers.table import render
from benchmarks.routers.texts import LONG_TOKENS, SHORT_TOKENS, texts
from kvrelay.config import RouterConfig
from kvrelay.deploy.model import fetch
from kvrelay.types import Value

RESULTS = Path(__file__).parent / "results" / "router.json"
QUICK_RESULTS = Path(__file__).parent / "results" / "router-quick.json"
MEMORY_STEPS = 5

Started = Callable[[float], contextlib.AbstractAsyncContextManager[Subject]]
"""A router whose mocks stream with so many seconds between two chunks; 0: at once."""


class Size(Value, frozen=True, kw_only=True):
    """How long each part takes."""

    seconds: float
    ttft_s: float
    memory_requests: int


FULL = Size(seconds=8.0, ttft_s=20.0, memory_requests=100_000)
QUICK = Size(seconds=3.0, ttft_s=8.0, memory_requests=10_000)


class Bench:
    """The texts and sizes of one run."""

    def __init__(self, size: Size, say: Say) -> None:
        self.size = size
        self._say = say
        self._short, self._long = (texts(fetch(), tokens) for tokens in (SHORT_TOKENS, LONG_TOKENS))

    def __repr__(self) -> str:
        return f"<Bench {self.size!r}>"

    async def _part(self, name: str, work: Awaitable[Found]) -> Found:
        figures = await work
        self._say(f"{name}: {figures}")
        return figures

    async def routed(self, start: Started, *, long: bool = True) -> Found:
        """Throughput of short and of long prompts, and time to the first token."""
        async with start(0.0) as subject:
            found = {"short": await self._part("short prompts", self._throughput(subject, self._short))}
            if long:
                found["long"] = await self._part("long prompts", self._throughput(subject, self._long, 1_000_000))
            found["ttft"] = await self._part("first tokens", self._first_tokens(subject))
        return found

    def _throughput(self, subject: Subject, prompts: list[str], first: int = 0) -> Awaitable[Found]:
        return measure.throughput(subject, prompts, self.size.seconds, first)

    def _first_tokens(self, subject: Subject) -> Awaitable[Found]:
        return measure.first_tokens(subject, self._short, self.size.ttft_s, 2_000_000)

    async def chunks(self, start: Started) -> Found:
        """Streams alone."""
        async with start(STREAM_TICK_S) as subject:
            return await self._part("chunks", measure.chunks(subject, self._short, self.size.seconds))

    async def proxied(self, start: Started) -> Found:
        """Requests and chunks of a router that only passes on."""
        async with start(0.0) as subject:
            found = {"short": await self._part("short prompts", self._throughput(subject, self._short))}
        return found | {"chunks": await self.chunks(start)}

    async def memory(self, start: Started) -> Found:
        """Resident memory while prompts without a common prefix keep coming."""
        async with start(0.0) as subject:
            requests = self.size.memory_requests
            return await self._part("memory", measure.memory(subject, self._short, requests, MEMORY_STEPS))

    async def alone(self) -> Found:
        """The mocks without a router: what every first token has in it."""
        async with mocks_alone.direct() as subject:
            return {"ttft": await self._part("first tokens", self._first_tokens(subject))}


async def _ours(bench: Bench) -> Found:
    found = await bench.routed(lambda tick_s: kvrelay(tick_s=tick_s))
    return found | {"chunks": await bench.chunks(lambda tick_s: kvrelay(tick_s=tick_s))}


async def _ours_proxy(bench: Bench) -> Found:
    plain = RouterConfig(kv_routing=False, hold_s=0.0)  # nobody waits: a proxy has no queue either
    return await bench.proxied(lambda tick_s: kvrelay(COLOCATED, tick_s, router=plain))


async def _ours_memory(bench: Bench) -> Found:
    return await bench.memory(lambda tick_s: kvrelay(tick_s=tick_s))


def _vllm_router(*, split: bool) -> Started:
    python = vllm_router.prepare(print)
    return lambda tick_s: vllm_router.vllm_router(python, split=split, tick_s=tick_s)


async def _vllm(bench: Bench) -> Found:
    start = _vllm_router(split=True)
    return await bench.routed(start) | {"chunks": await bench.chunks(start)}


async def _vllm_proxy(bench: Bench) -> Found:
    return await bench.proxied(_vllm_router(split=False))


async def _vllm_memory(bench: Bench) -> Found:
    return await bench.memory(_vllm_router(split=True))


async def _dynamo(bench: Bench) -> Found:
    if not enclosure.inside():
        return {"left_out": enclosure.why_not() or "it was not started in a network namespace"}
    python = dynamo_frontend.prepare(print)
    return await bench.routed(lambda _tick_s: dynamo_frontend.dynamo(python))


STAGES: dict[str, Callable[[Bench], Awaitable[Found]]] = {
    "mocks": Bench.alone,
    "kvrelay": _ours,
    "vllm-router": _vllm,
    "dynamo": _dynamo,
    "kvrelay-proxy": _ours_proxy,
    "vllm-router-proxy": _vllm_proxy,
    "kvrelay-memory": _ours_memory,
    "vllm-router-memory": _vllm_memory,
}


def run(names: Sequence[str], size: Size, results: Path) -> Found:
    """Run the stages and merge what they find into ``results``."""
    for name in names:
        keep(results, name, asyncio.run(_stage(name, size)))
    return read(results)


async def _stage(name: str, size: Size) -> Found:
    return await STAGES[name](Bench(size, say_with_clock(name)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the router beside its peers, and print one table.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"all when none is named: {' '.join(STAGES)}")
    parser.add_argument("--quick", action="store_true", help="shorter, in a results file of its own")
    options = parser.parse_args()
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; known: {', '.join(STAGES)}")
    names = options.stages or list(STAGES)
    if not enclosure.inside() and not enclosure.why_not():
        _prepare(names)
        enclosure.enter("benchmarks.router", [*(["--quick"] if options.quick else []), *names])
    size, results = (QUICK, QUICK_RESULTS) if options.quick else (FULL, RESULTS)
    print(render(run(names, size, results)))


def _prepare(names: Sequence[str]) -> None:
    """Install what is missing while there is still a network."""
    fetch()
    if any(name.startswith("vllm-router") for name in names):
        vllm_router.prepare(print)
    if "dynamo" in names:
        dynamo_frontend.prepare(print)


if __name__ == "__main__":
    main()
