"""A tiny random model for tests that need many answers or many engines: what clusters of it are made of, and prompts.

Its answers are nonsense, but each depends on every token of its prompt, so a wrong page changes them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kvrelay.config import ClusterConfig, Config, ModelConfig, RouterConfig, StoreConfig, WorkerConfig
from kvrelay.deploy.tiny import TinyShape

MODEL = "tiny"
SHAPE = TinyShape(layers=2)
PAGE_TOKENS = BLOCK_TOKENS = 32
PAGE_BYTES = PAGE_TOKENS * SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4
"""Of a page and of an engine's block, in float32."""
TOOL_PARSER = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
FIRST_TOKEN = 3
"""Below it are the special ones."""


def config(
    *, arena_pages: int, kv_blocks: int, stores: int = 2, prefill: int = 1, decode: int = 1, longest: int = 256
) -> Config:
    """A split cluster in float32, so that equal answers are equal to the byte. ``longest``: of prompt and answer."""
    return Config(
        model=ModelConfig(dtype="float32", name=MODEL),
        router=RouterConfig(port=0, control_port=0, local_prefill="never"),
        store=StoreConfig(arena_bytes=arena_pages * PAGE_BYTES, page_lease_s=1.0),
        worker=WorkerConfig(
            kv_cache_bytes=kv_blocks * PAGE_BYTES,
            max_batched_tokens=256,
            max_model_len=longest,
            block_tokens=BLOCK_TOKENS,
            page_tokens=PAGE_TOKENS,
            vllm_args=TOOL_PARSER,
        ),
        cluster=ClusterConfig(prefill=prefill, decode=decode, stores=stores),
    )


def ids(rng: random.Random, tokens: int) -> list[int]:
    """A prompt, or a part of one, that nothing else begins with."""
    return [rng.randrange(FIRST_TOKEN, SHAPE.vocab) for _ in range(tokens)]


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def at_most(limit: int, work: Iterable[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Results of ``work``, up to ``limit`` of it at a time."""
    gate = asyncio.Semaphore(limit)

    async def one(job: Callable[[], Awaitable[Any]]) -> Any:
        async with gate:
            return await job()

    return await asyncio.gather(*(one(job) for job in work))
