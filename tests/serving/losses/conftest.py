"""One prefill and two decode workers, on two nodes that share no memory, which these tests kill, stop and cut off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest_asyncio

from benchmarks.breaking.wired import wired
from tests.serving import tiny
from tests.serving.losses.breakable import Breakable


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def probe(tiny_model: Path, http: aiohttp.ClientSession) -> AsyncIterator[Breakable]:
    config = tiny.config(arena_pages=2048, kv_blocks=512, prefill=1, decode=2, longest=1024)
    async with wired(config, tiny_model) as (cluster, wires):
        yield Breakable(cluster, http, wires)
