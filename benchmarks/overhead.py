"""What saving KV costs a prefill: an engine with the connector beside one without, prompt by prompt in turn.

Run:  python -m benchmarks.overhead          (SmolLM2 in bfloat16; both engines on the same core, one at work at a time)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks import handoff
from benchmarks.handoff import MODEL
from kvrelay.config import ClusterConfig, Config
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.server import plain_engine

LENGTHS = (512, 2048)
ROUNDS = 12
RESULTS = Path(__file__).parent / "results" / "overhead.json"

rng = random.Random(2)


def config() -> Config:
    """One worker that does both, on one core."""
    base = handoff.config()
    worker = msgspec.structs.replace(base.worker, cpus="0")
    return msgspec.structs.replace(base, worker=worker, cluster=ClusterConfig(prefill=0, decode=0, colocated=1))


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[tuple[LocalCluster, str]]:
    """A worker with the connector, and the URL of an engine without."""
    model = fetch()
    spec = engine_spec(config(), model, port=free_port(), cpus=(0,))
    with tempfile.TemporaryDirectory() as folder:
        async with plain_engine(spec, Path(folder) / "log") as plain, LocalCluster(config(), model=model) as cluster:
            yield cluster, plain.url


async def prefill_s(http: aiohttp.ClientSession, url: str, tokens: int) -> float:
    ids = [rng.randrange(1000, 40000) for _ in range(tokens)]
    body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0}
    start = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    return time.perf_counter() - start


async def measure() -> dict[str, Any]:
    async with engines() as (cluster, plain_url):
        headers = {"Authorization": f"Bearer {cluster.engine_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            (worker,) = cluster.workers
            rows: dict[str, Any] = {}
            for tokens in LENGTHS:
                pairs = []
                for _round in range(ROUNDS + 1):
                    await asyncio.sleep(1.2)  # an engine spins for a second after a step; both share one core
                    saving = await prefill_s(http, worker.url, tokens)
                    await asyncio.sleep(1.2)
                    pairs.append((saving, await prefill_s(http, plain_url, tokens)))
                rows[str(tokens)] = _row(pairs[1:])
            return rows


def _row(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [saving / plain for saving, plain in pairs]
    return {
        "with_ms": round(1e3 * statistics.median(saving for saving, _ in pairs), 1),
        "without_ms": round(1e3 * statistics.median(plain for _, plain in pairs), 1),
        "ratio": round(statistics.median(ratios), 4),
    }


def main() -> None:
    rows = asyncio.run(measure())
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for tokens, row in rows.items():
        print(f"{tokens:>5} tokens: {row['with_ms']} ms with, {row['without_ms']} ms without, ratio {row['ratio']}")


if __name__ == "__main__":
    main()
