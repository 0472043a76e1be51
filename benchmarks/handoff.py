"""How long a hand-off takes: from P's HTTP response to D's first token, minus what a one-token prompt takes on D.

Run:  python -m benchmarks.handoff          (two free cores; SmolLM2 in bfloat16, one prefill and one decode worker)
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp

from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import fetch
from kvrelay.types import Role

LENGTHS = (256, 1024, 3000)
ROUNDS = 7
MODEL = "smollm2"
RESULTS = Path(__file__).parent / "results" / "handoff.json"

rng = random.Random(1)


def config() -> Config:
    return Config(
        model=ModelConfig(name=MODEL),
        router=RouterConfig(port=0, control_port=0, local_prefill="never"),
        store=StoreConfig(arena_bytes=2 << 30),
        worker=WorkerConfig(kv_cache_bytes=512 << 20, max_batched_tokens=512),
        cluster=ClusterConfig(prefill=1, decode=1),
    )


def body(tokens: int) -> dict[str, Any]:
    """A prompt that shares no page with any other."""
    ids = [rng.randrange(1000, 40000) for _ in range(tokens)]
    return {"model": MODEL, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}


async def first_token_s(http: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> tuple[float, str]:
    """Seconds to the first event of the stream, and the request's id."""
    start = time.perf_counter()
    async with http.post(f"{url}/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        first = 0.0
        async for line in response.content:
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter() - start
        return first, response.headers.get("x-request-id", "")


async def exposed_s(http: aiohttp.ClientSession, url: str, tokens: int) -> dict[str, float]:
    """One hand-off's timeline, in seconds."""
    _, request_id = await first_token_s(http, url, body(tokens))
    async with http.get(f"{url}/kvrelay/requests/{request_id}") as response:
        events: dict[str, float] = (await response.json())["events"]
    return {
        "gap": events["first_token"] - events["prefill_finished"],
        "prefill": events["prefill_finished"] - events["prefill_started"],
        "loaded": events["loaded"] - events["prefill_finished"],
    }


async def measure() -> dict[str, Any]:
    async with LocalCluster(config(), model=fetch()) as cluster, aiohttp.ClientSession() as http:
        decode = next(worker for worker in cluster.workers if worker.role is Role.DECODE)
        headers = {"Authorization": f"Bearer {cluster.engine_key}"}
        async with aiohttp.ClientSession(headers=headers) as direct:
            floors = [(await first_token_s(direct, decode.url, body(1)))[0] for _ in range(3 * ROUNDS)][ROUNDS:]
        floor = statistics.median(floors)
        rows: dict[str, Any] = {"floor_ms": round(1e3 * floor, 1)}
        for tokens in LENGTHS:
            await exposed_s(http, cluster.url, tokens)
            runs = [await exposed_s(http, cluster.url, tokens) for _ in range(ROUNDS)]
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows[str(tokens)] = {f"{key}_ms": round(1e3 * value, 1) for key, value in medians.items()}
            rows[str(tokens)]["exposed_ms"] = round(1e3 * (medians["gap"] - floor), 1)
        return rows


def main() -> None:
    rows = asyncio.run(measure())
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"one-token prompt on D, first token: {rows['floor_ms']} ms")
    for tokens in LENGTHS:
        row = rows[str(tokens)]
        print(
            f"{tokens:>5} tokens: prefill {row['prefill_ms']:>7} ms, P to first token {row['gap_ms']} ms, "
            f"of it hand-off {row['exposed_ms']} ms (KV in D's blocks {row['loaded_ms']} ms after the response)"
        )


if __name__ == "__main__":
    main()
