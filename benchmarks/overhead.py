"""What the connector costs an engine beside one without: time of a prefill, and processor time when idle."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.answers import completion, whole
from benchmarks.idle import Cpu
from benchmarks.progress import Say
from benchmarks.prompts import Prompts
from benchmarks.quantiles import ms
from benchmarks.split import config
from kvrelay.config import ClusterConfig, Config
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.server import plain_engine
from kvrelay.types import Value

_SPIN_S = 1.2
"""An engine spins for a second after a step, and both share one core."""
_SETTLE_S = 3.0


class Pair(Value, frozen=True, kw_only=True):
    """A cluster of one worker, and a plain engine on the worker's core."""

    cluster: Any
    plain_url: str
    plain_pid: int


def _config() -> Config:
    base = config()
    worker = msgspec.structs.replace(base.worker, cpus="0")
    return msgspec.structs.replace(base, worker=worker, cluster=ClusterConfig(prefill=0, decode=0, colocated=1))


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[Pair]:
    """A worker with the connector, and an engine without, with the same flags."""
    model = fetch()
    spec = engine_spec(_config(), model, port=free_port(), cpus=(0,))
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        async with plain_engine(spec, Path(folder) / "log") as plain, LocalCluster(_config(), model=model) as cluster:
            yield Pair(cluster=cluster, plain_url=plain.url, plain_pid=plain.pid)


async def prefills(pair: Pair, lengths: Sequence[int], rounds: int, say: Say) -> dict[str, Any]:
    """Time of a prefill with and without, prompt by prompt in turn."""
    prompts = Prompts(seed=2)
    headers = {"Authorization": f"Bearer {pair.cluster.engine_key}"}
    (worker,) = pair.cluster.workers
    figures: dict[str, Any] = {}
    async with aiohttp.ClientSession(headers=headers) as http:
        for tokens in lengths:
            runs = []
            for _round in range(rounds + 1):  # the first one warms up
                saving_s = await _prefill_s(http, worker.url, prompts.of(tokens))
                runs.append((saving_s, await _prefill_s(http, pair.plain_url, prompts.of(tokens))))
            figures[str(tokens)] = _row(runs[1:])
            say(f"prefill of {tokens} tokens: {figures[str(tokens)]}")
    return figures


async def _prefill_s(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> float:
    await asyncio.sleep(_SPIN_S)
    begin_s = time.monotonic()
    await whole(http, url, completion(prompt, 1))
    return time.monotonic() - begin_s


def _row(runs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "n": len(runs),
        "with_ms": ms(statistics.median(saving for saving, _ in runs)),
        "without_ms": ms(statistics.median(plain for _, plain in runs)),
        "ratio": round(statistics.median(saving / plain for saving, plain in runs), 4),
    }


async def idle(pair: Pair, duration_s: float, say: Say) -> dict[str, Any]:
    """Processor time while nothing is asked, in shares of a core.

    ``cluster`` is that of one P and one D with their store and router: one worker was measured and counts twice.
    """
    await asyncio.sleep(_SETTLE_S)
    cluster = pair.cluster
    (worker,) = cluster.workers
    meters = {
        "router": Cpu.of(cluster.pid("router")),
        "store": Cpu.of(cluster.pid("store-0")),
        "supervisor": Cpu.of(worker.pid),
        "engine": Cpu.below(worker.pid),
        "plain_engine": Cpu.tree(pair.plain_pid),
    }
    await asyncio.sleep(duration_s)
    shares = {name: meter.share() for name, meter in meters.items()}
    worker_share = shares["supervisor"] + shares["engine"] - shares["plain_engine"]
    figures = {name: round(share, 5) for name, share in shares.items()}
    figures["cluster"] = round(shares["router"] + shares["store"] + 2 * worker_share, 5)
    say(f"idle, shares of a core: {figures}")
    return figures
