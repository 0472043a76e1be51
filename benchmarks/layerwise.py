"""When D's first token comes with the three ways to load a prompt's last layers: asynchronously, synchronously layer by
layer, and asynchronously but reported before the last layers are in.

Run:  python -m benchmarks.layerwise          (two free cores; SmolLM2 in bfloat16, one store, idle engines)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvrelay.config import Config, ConnectorConfig, ModelConfig, WorkerConfig
from kvrelay.deploy import server
from kvrelay.deploy.engine import EngineSpec, engine_command, engine_spec
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.server import engine_server, write_to
from kvrelay.protocol import DecodeLeg, PrefillLeg, handoff_params
from kvrelay.store.daemon import run_store

LENGTHS = (256, 1024, 3000)
ROUNDS = 8
MODEL = "smollm2"
WAYS = {"async": 10, "sync": 11, "early": 12}
"""First token of the prompt by way: see ``layerwise_connector``."""
KEY = "k" * 32
RESULTS = Path(__file__).parent / "results" / "layerwise.json"

rng = random.Random(3)
numbers = itertools.count()


def config() -> Config:
    """In float32: not every CPU multiplies bfloat16 quickly."""
    return Config(
        model=ModelConfig(name=MODEL, dtype="float32"),
        worker=WorkerConfig(kv_cache_bytes=512 << 20, max_batched_tokens=512),
    )


def experiment_command(spec: EngineSpec, build: Any = engine_command) -> list[str]:
    """The engine's command with the experiment's connector."""
    swaps = (
        ('"kvrelay.connector.vllm"', '"benchmarks.layerwise_connector"'),
        ("KvrelayConnector", "ExperimentConnector"),
    )
    command: list[str] = build(spec)
    for old, new in swaps:
        command = [part.replace(old, new) for part in command]
    return command


@contextlib.asynccontextmanager
async def engines(folder: Path) -> AsyncIterator[list[str]]:
    """URLs of a prefill and a decode engine on one store."""
    server.engine_command = experiment_command  # type: ignore[attr-defined]
    key, model = folder / "key", fetch()
    key.write_text(KEY)
    ready = asyncio.Event()
    store = asyncio.create_task(
        run_store(
            config(), name="s", socket_path=folder / "s", key=KEY.encode(), routers=(), ready=lambda _: ready.set()
        )
    )
    await ready.wait()
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for cpu in (0, 1):
            connector = ConnectorConfig(
                worker=f"w{cpu}", incarnation="1", store_socket=str(folder / "s"), key_file=str(key),
                engine_file=str(folder / f"e{cpu}"), weights="w", page_tokens=32, load_wait_s=2.0,
            )  # fmt: skip
            spec = msgspec.structs.replace(
                engine_spec(config(), model, port=free_port(), cpus=(cpu,)), connector=connector
            )
            log = stack.enter_context((folder / f"log{cpu}").open("wb"))
            server_ = await stack.enter_async_context(engine_server(spec, write_to(log), api_key="key"))
            await server_.wait_serving(300)
            urls.append(server_.url)
        yield urls
    store.cancel()
    await asyncio.gather(store, return_exceptions=True)


async def first_event(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    first = 0.0
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter()
    return first


async def handed_over(http: aiohttp.ClientSession, urls: list[str], tokens: int, way: str) -> tuple[float, float]:
    """D's first token after P's response, and after the request, in seconds."""
    ids = [WAYS[way]] + [rng.randrange(1000, 40000) for _ in range(tokens - 1)]
    transfer = f"t{next(numbers)}"
    base = {"model": MODEL, "prompt": ids, "temperature": 0, "ignore_eos": True}
    prefill = base | {
        "max_tokens": 1,
        "kv_transfer_params": handoff_params(PrefillLeg(transfer=transfer, push_to=None)),
    }
    leg = handoff_params(DecodeLeg(transfers=[transfer]))
    decode = base | {"max_tokens": 4, "stream": True, "kv_transfer_params": leg}

    async def answer() -> float:
        async with http.post(f"{urls[0]}/v1/completions", json=prefill) as response:
            assert response.status == 200, await response.text()
            await response.read()
            return time.perf_counter()

    start = time.perf_counter()
    ended, first = await asyncio.gather(answer(), first_event(http, urls[1], decode))
    return first - ended, first - start


async def measure() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        async with engines(Path(name)) as urls, aiohttp.ClientSession(headers={"Authorization": "Bearer key"}) as http:
            one = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
            floors = []
            for _ in range(3 * ROUNDS):
                start = time.perf_counter()
                body = one | {"prompt": [rng.randrange(1000, 40000)]}
                floors.append(await first_event(http, urls[1], body) - start)
            floor = statistics.median(floors[ROUNDS:])
            rows["floor_ms"] = round(1e3 * floor, 1)
            for tokens in LENGTHS:
                taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
                rounds = ROUNDS if tokens < 2000 else ROUNDS // 2
                for number in range(rounds + 1):
                    for way in WAYS:
                        pair = await handed_over(http, urls, tokens, way)
                        if number:
                            taken[way].append(pair)
                rows[str(tokens)] = {way: row(pairs, floor) for way, pairs in taken.items()}
                print(tokens, rows[str(tokens)], flush=True)
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def row(pairs: list[tuple[float, float]], floor: float) -> dict[str, float]:
    gaps = sorted(gap for gap, _ in pairs)
    return {
        "gap_ms": round(1e3 * statistics.median(gaps), 1),
        "gap_low_ms": round(1e3 * gaps[len(gaps) // 4], 1),
        "gap_high_ms": round(1e3 * gaps[3 * len(gaps) // 4], 1),
        "exposed_ms": round(1e3 * (statistics.median(gaps) - floor), 1),
        "ttft_ms": round(1e3 * statistics.median(total for _, total in pairs), 1),
    }


def main() -> None:
    rows = asyncio.run(measure())
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
