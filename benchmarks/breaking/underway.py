"""Real engines under load while all workers are restarted in turn, or two parties are cut off from each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.breaking.asking import Asking, Stream
from benchmarks.breaking.bench import clients
from benchmarks.breaking.drained import drained
from benchmarks.breaking.loss import spread
from benchmarks.breaking.real import CONFIG
from benchmarks.breaking.stopped import processes, stopped
from benchmarks.breaking.wired import Wires, wired
from benchmarks.progress import say_with_clock
from kvrelay.cli.draining import Routers
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import model_path

CLIENTS = 2
PROMPT_TOKENS = 300
ANSWER_TOKENS = 40
AWAY_S = 5.0

Partition = Callable[[LocalCluster, Wires], AbstractContextManager[None]]
PARTITIONS: dict[str, Partition] = {
    "router and decode worker": lambda _, wires: wires.between_router_and_decode(),
    "store of P and store of D": lambda _, wires: wires.between_stores(),
    "decode workers and their store": lambda cluster, _: stopped(cluster.pid("store-1")),
}
"""The last one stands still as a whole: the socket between the two cannot lose anything."""


class Load:
    """Clients that ask one after another; every answer is compared afterwards with what is answered at rest."""

    def __init__(self, site: Asking) -> None:
        self._site = site
        self._stop = asyncio.Event()
        self.asked: list[tuple[list[int], Stream]] = []

    def __repr__(self) -> str:
        return f"<Load, {len(self.asked)} requests>"

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """They ask inside the block, and what they began is answered at its end."""
        async with asyncio.TaskGroup() as all_of_them:
            for _ in range(CLIENTS):
                all_of_them.create_task(self._ask())
            yield
            self._stop.set()

    async def _ask(self) -> None:
        while not self._stop.is_set():
            prompt, stream = self._site.prompt(PROMPT_TOKENS), Stream()
            self.asked.append((prompt, stream))
            try:
                await self._site.stream(prompt, ANSWER_TOKENS, stream)
            except (aiohttp.ClientError, TimeoutError):
                stream.error = True

    async def counts(self) -> dict[str, int]:
        """``answered``: whole and right; ``wrong``: whole and not right; ``failed``: the others."""
        counts = {"answered": 0, "wrong": 0, "failed": 0}
        for prompt, stream in self.asked:
            right = await self._site.stream(prompt, ANSWER_TOKENS)
            wrong = "wrong" if stream.is_whole else "failed"
            counts["answered" if stream.says(right.tokens) else wrong] += 1
        return counts


async def restarts(quick: bool) -> dict[str, Any]:
    """SmolLM2 on vLLM: every worker is drained, killed and started again while clients ask."""
    say, restarted = say_with_clock("restarts"), 0
    say("three engines start")
    async with wired(CONFIG, model_path()) as (cluster, _), clients() as http:
        load = Load(Asking(cluster, http))
        began = time.monotonic()
        async with load.asking():
            for worker in cluster.workers[:1] if quick else cluster.workers:
                say(f"{worker.name} is drained and started again")
                async with Routers(cluster.controls, cluster.key) as routers:
                    await drained(routers, worker.name)
                await cluster.restart(worker.name)
                restarted += 1
        took_s = time.monotonic() - began
        return {"restarted": restarted, "seconds": round(took_s, 1)} | await load.counts()


async def partitions(quick: bool) -> dict[str, Any]:
    """SmolLM2 on vLLM: nothing passes between two parties for five seconds while clients ask."""
    say = say_with_clock("partitions")
    say("three engines start")
    figures: dict[str, Any] = {}
    async with wired(CONFIG, model_path()) as (cluster, wires), clients() as http:
        site = Asking(cluster, http)
        for parties, partition in PARTITIONS.items():
            say(f"nothing passes between {parties}")
            rounds = [await _part(site, partition, wires) for _ in range(1 if quick else 2)]
            figures[parties] = {
                "rounds": len(rounds),
                "processes_died": sum(each["died"] for each in rounds),
                "longest_wait_s": spread([each["longest_wait_s"] for each in rounds]),
            } | {ending: sum(each[ending] for each in rounds) for ending in ("answered", "wrong", "failed")}
    return figures


async def _part(site: Asking, partition: Partition, wires: Wires) -> dict[str, Any]:
    load, before = Load(site), processes(site.cluster)
    async with load.asking():
        await asyncio.sleep(1.0)
        with partition(site.cluster, wires):
            await asyncio.sleep(AWAY_S)
        await asyncio.sleep(1.0)
    died = sum(len(before[name] - now) for name, now in processes(site.cluster).items())
    for worker in site.cluster.workers:
        await site.until(f'kvrelay_worker_ready{{role="{worker.role}",worker="{worker.name}"}}', 1)
    waits = [max(stream.first_token_s, stream.longest_pause_s) for _, stream in load.asked if stream.came_s]
    return {"died": died, "longest_wait_s": max(waits)} | await load.counts()
