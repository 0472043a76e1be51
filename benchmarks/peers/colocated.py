"""What a split has to beat: as many stock vLLM engines that each do everything, asked in turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from benchmarks.answers import completion, stream
from benchmarks.split import Handed, config
from kvrelay.deploy.engine import engine_spec
from kvrelay.deploy.model import fetch
from kvrelay.deploy.ports import free_port
from kvrelay.deploy.server import plain_engine

VLLM_BUDGET_TOKENS = 2048
"""vLLM 0.32's default for a server on CPU (``EngineArgs.get_batch_defaults``)."""
SMALL_BUDGET_TOKENS = 256
"""Long prompts no longer stop streams for seconds, and take longer themselves."""


class Colocated:
    """Round robin over engines that know nothing of each other."""

    def __init__(self, urls: Sequence[str], http: aiohttp.ClientSession) -> None:
        self._urls = itertools.cycle(urls)
        self._http = http

    def __repr__(self) -> str:
        return "<Colocated>"

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Handed:
        answer = await stream(self._http, next(self._urls), completion(prompt, max_tokens))
        return Handed(answer=answer, prefill_s=None, gap_s=None)


@contextlib.asynccontextmanager
async def colocated(budget_tokens: int) -> AsyncIterator[Colocated]:
    """Two engines, each on a core of its own, with steps of at most ``budget_tokens``."""
    wanted = config(max_batched_tokens=budget_tokens, shared_chunk_tokens=0)
    specs = [engine_spec(wanted, fetch(), port=free_port(), cpus=(core,)) for core in (0, 1)]
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            starts = [plain_engine(spec, Path(folder) / f"{spec.port}.log") for spec in specs]
            engines = await asyncio.gather(*(stack.enter_async_context(start) for start in starts))
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
            yield Colocated([engine.url for engine in engines], http)
