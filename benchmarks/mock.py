"""What a request costs the process of 16x16 mock workers: its CPU time beside the router's, at full load.

``python -m benchmarks.mock`` says how much of a router benchmark on mocks is the mocks'. Clients run in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from benchmarks.machine import describe
from benchmarks.prompts import Prompts
from kvrelay.config import ClusterConfig, Config, MockConfig, RouterConfig, WorkerConfig
from kvrelay.deploy.local import LocalCluster
from kvrelay.deploy.model import model_path

RESULTS = Path(__file__).parent / "results" / "mock.json"
CLIENTS = 64
OUTPUT_TOKENS = 16
WARM_S = 3.0
ENOUGH, ENOUGH_S = 100, 2.0
"""Requests and seconds of a window: the kernel counts CPU time in steps of 10 ms."""
TIME_SCALE = 0.01
"""Engines that take a hundredth of an H100's time: the processes are what limits, not the simulated workers."""
CASES = {"short": (32, False), "short, streamed": (32, True), "4k": (4096, False), "4k, streamed": (4096, True)}
"""Prompt tokens, all different, and whether answers are streamed."""


class Load:
    """Closed-loop clients and what they got done."""

    def __init__(self, url: str, model: str, prompt_tokens: int, stream: bool) -> None:
        self._url = f"{url}/v1/completions"
        self._fields = {"model": model, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": stream}
        self._tokens = prompt_tokens
        self.done = 0

    def __repr__(self) -> str:
        return f"<Load {self.done} requests>"

    async def client(self, http: aiohttp.ClientSession, seed: int) -> None:
        prompts = Prompts(seed)
        while True:
            body = msgspec.json.encode(self._fields | {"prompt": prompts.of(self._tokens)})
            headers = {"content-type": "application/json"}
            async with http.post(self._url, data=body, headers=headers) as response:
                await response.read()
                response.raise_for_status()
            self.done += 1


async def measure(cluster: LocalCluster, case: str, seconds: float) -> dict[str, Any]:
    tokens, stream = CASES[case]
    load = Load(cluster.url, Path(cluster.model).name, tokens, stream)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        clients = [asyncio.create_task(load.client(http, seed)) for seed in range(CLIENTS)]
        await asyncio.sleep(WARM_S)
        windows = [await _window(cluster, load) for _ in range(max(1, round(seconds / ENOUGH_S)))]
        for client in clients:
            client.cancel()
        for outcome in await asyncio.gather(*clients, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError(f"a client ended: {outcome!r}")
    return {name: _spread([window[name] for window in windows]) for name in windows[0]}


async def _window(cluster: LocalCluster, load: Load) -> dict[str, float]:
    """A short time: on a machine that others use too, the least disturbed one says most."""
    before, done, began = _cpu_s(cluster), load.done, time.monotonic()
    while load.done - done < ENOUGH or time.monotonic() - began < ENOUGH_S:
        await asyncio.sleep(0.1)
    after, count, took_s = _cpu_s(cluster), load.done - done, time.monotonic() - began
    cpu_ms = {f"{name}_cpu_ms": 1e3 * (after[name] - before[name]) / count for name in after}
    return {"requests_per_s": count / took_s, **cpu_ms}


def _spread(values: list[float]) -> dict[str, float]:
    return {"lowest": round(min(values), 3), "median": round(statistics.median(values), 3)}


def _cpu_s(cluster: LocalCluster) -> dict[str, float]:
    times = {name: psutil.Process(cluster.pid(name)).cpu_times() for name in ("mock", "router")}
    return {name: spent.user + spent.system for name, spent in times.items()}


async def run(seconds: float, rounds: int) -> dict[str, Any]:
    config = Config(
        worker=WorkerConfig(max_batched_tokens=8192, shared_chunk_tokens=0),  # what vLLM does on a GPU
        mock=MockConfig(enabled=True, time_scale=TIME_SCALE),
        router=RouterConfig(port=0, control_port=0, local_prefill="never", hold_s=300.0, queue_s=300.0),
        cluster=ClusterConfig(prefill=16, decode=16),
    )
    results: dict[str, list[Any]] = {case: [] for case in CASES}
    async with LocalCluster(config, model=model_path()) as cluster:
        for _ in range(rounds):
            for case, measured in results.items():
                measured.append(await measure(cluster, case, seconds))
                print(case, measured[-1], flush=True)
    return {"machine": describe(), "clients": CLIENTS, "output_tokens": OUTPUT_TOKENS, "cases": results}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=8.0, help="of each case")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    results = asyncio.run(run(given.seconds, given.rounds))
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


if __name__ == "__main__":
    main()
